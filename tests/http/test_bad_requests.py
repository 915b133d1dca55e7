"""What clients may get wrong: a 4xx in OpenAI's shape that names the field, and a server that is unharmed."""

from __future__ import annotations

import json

import httpx
import pytest

MESSAGES = [{"role": "user", "content": "hi"}]


async def post(client: httpx.AsyncClient, path: str, body: bytes | str) -> httpx.Response:
    return await client.post(path, content=body, headers={"Content-Type": "application/json"})


async def check_unharmed(client, server) -> None:
    assert server.engine.added == []
    assert server.engine.taken == 0
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt", "prompt[1]"),
        ({"prompt": None}, "prompt", "null"),
        ({"prompt": 5}, "prompt", "number"),
        ({"prompt": {"a": 1}}, "prompt", "object"),
        ({"prompt": ["a", [1]]}, "prompt", "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt", "prompt[1]"),
        ({"prompt": [1, 2.5]}, "prompt", "prompt[1]"),
        ({"prompt": [True]}, "prompt", "boolean"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [10**6]}, "prompt", "1000000"),
        ({"prompt": [10**30]}, "prompt", "token id"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"max_tokens": 10**30}, "max_tokens", "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens", "less than or equal"),
        ({"max_tokens": "16"}, "max_tokens", "integer"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"min_tokens": 20, "max_tokens": 4}, "min_tokens", "at most 4"),
        ({"temperature": -0.1}, "temperature", "greater"),
        ({"temperature": 1e9}, "temperature", "less"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.1}, "top_p", "less"),
        ({"top_k": 2.5}, "top_k", "integer"),
        ({"top_k": -2}, "top_k", "greater"),
        ({"min_p": 2}, "min_p", "less"),
        ({"n": 0}, "n", "greater"),
        ({"n": 1000}, "n", "at most 128"),
        ({"n": 2, "best_of": 3}, "best_of", "best_of"),
        ({"seed": 2**63}, "seed", "seed"),
        ({"seed": "x"}, "seed", "integer"),
        ({"presence_penalty": 3}, "presence_penalty", "less"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than"),
        # In float32 it is 0, and dividing a logit by it would fail the sequence in the engine.
        ({"repetition_penalty": 1e-300}, "repetition_penalty", "greater than"),
        ({"logprobs": 21}, "logprobs", "less"),
        ({"logprobs": -1}, "logprobs", "greater"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "100"),
        ({"logit_bias": {"5": "1"}}, "logit_bias", "100"),
        ({"logit_bias": [5]}, "logit_bias", "list"),
        ({"stop": ""}, "stop", "characters"),
        ({"stop": ["a", 5]}, "stop", "strings"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": "x" * 2000}, "stop", "2000"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "99999"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater"),
        ({"stop_token_ids": 5}, "stop_token_ids", "array"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": 5}, "stream_options", "object"),
        ({"echo": 1}, "echo", "boolean"),
        ({"model": 5}, "model", "string"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"guided_regex": "refuse me"}, "guided_regex", "refuses"),
        ({"guided_regex": "a", "grammar": "b"}, "guided_regex", "only one"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"guided_regex": "a", "min_tokens": 1, "max_tokens": 4}, "min_tokens", "guided_regex"),
        ({"guided_regex": 5}, "guided_regex", "string"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_json": "[]"}, "guided_json", "object"),
        ({"guided_json": {"not": {}}}, "guided_json", "'not'"),
        (
            {"json_schema": {"properties": {"a": {"items": {"contains": {}}}}}},
            "json_schema",
            "'properties.a.items.contains'",
        ),
        ({"json_schema": {"properties": {"a": 5}}}, "json_schema", "properties.a must be"),
        ({"json_schema": {"$ref": "https://example.org/s"}}, "json_schema", "$ref"),
        ({"json_schema": {"allOf": [{}, {}]}}, "json_schema", "allOf"),
        ({"response_format": {"type": "sound"}}, "response_format", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": 5}, "response_format", "object"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "array"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "only one"),
        ({"skip_special_tokens": 1}, "skip_special_tokens", "boolean"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "echo"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids", "not supported"),
    ],
)
async def test_a_bad_completion_field_is_named(client, server, fields, param, words):
    response = await client.post("/v1/completions", json={"prompt": "a", **fields})

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    await check_unharmed(client, server)


async def test_too_many_prompts_are_refused_before_they_are_tokenised(client, server, monkeypatch):
    """A million short prompts fit into one body, and would hold the event loop for half a minute."""
    tokenised = []
    monkeypatch.setattr(server.context.tokenizer, "encode", lambda text, **_: tokenised.append(text) or [2])
    response = await client.post("/v1/completions", json={"prompt": ["a"] * 129})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert "at most 128" in response.json()["error"]["message"]
    assert tokenised == []
    await check_unharmed(client, server)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "array"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "system"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "at least 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "text",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less"),
        ({"logprobs": 1}, "logprobs", "boolean"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "0"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "no place for tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools", "same name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools", "at most 128"),
        ({"tool_choice": "required"}, "tool_choice", "at least one"),
        ({"tool_choice": "sometimes"}, "tool_choice", "'required'"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not run"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "add_generation_prompt",
        ),
    ],
)
async def test_a_bad_chat_field_is_named(client, server, fields, param, words):
    response = await client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    await check_unharmed(client, server)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", None, "JSON"),
        (b"{", None, "JSON"),
        (b"nonsense", None, "JSON"),
        (b"[1]", None, "object"),
        (b'"text"', None, "object"),
        (b"{}", "prompt", "required"),
        (b'{"prompt": "a\xff"}', None, "JSON"),
        (b'{"prompt": "\\ud800"}', None, "JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature", "finite"),
        (b'{"prompt": "a", "temperature": Infinity}', "temperature", "finite"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature", "finite"),
        (b'{"prompt": "a", "top_p": -Infinity}', "top_p", "finite"),
        (b'{"prompt": "a", "logit_bias": {"5": NaN}}', "logit_bias", "100"),
        (b'{"prompt": ' + b"[" * 100_000, None, "JSON"),
        (b'{"prompt": ' + b"[" * 150 + b"]" * 150 + b"}", "prompt", "prompt"),
    ],
)
async def test_a_body_that_is_no_request_is_refused(client, server, body, param, words):
    response = await post(client, "/v1/completions", body)

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]
    await check_unharmed(client, server)


async def test_a_body_that_is_not_announced_as_json_is_refused(client, server):
    headers = {"Content-Type": "text/plain"}
    response = await client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)

    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]
    await check_unharmed(client, server)


async def test_an_unknown_model_is_a_404(client, server):
    response = await client.post("/v1/completions", json={"model": "gpt-9", "prompt": "a"})

    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "'gpt-9'" in error["message"]
    assert "'tiny'" in error["message"]
    await check_unharmed(client, server)


@pytest.mark.parametrize("length", [256, 257, 1000])
async def test_a_prompt_over_the_context_is_told_with_its_length(client, server, length):
    response = await client.post("/v1/completions", json={"prompt": [5] * length})

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert "maximum context length is 256 tokens" in error["message"]
    assert f"{length} tokens" in error["message"]
    await check_unharmed(client, server)


async def test_prompt_and_max_tokens_over_the_context_are_added_up(client, server):
    response = await client.post("/v1/completions", json={"prompt": [5] * 200, "max_tokens": 57})

    error = response.json()["error"]
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens"
    for number in ("256", "200", "57", "257"):
        assert number in error["message"]
    await check_unharmed(client, server)


async def test_prompt_and_max_tokens_may_fill_the_context_exactly(client, server):
    response = await client.post("/v1/completions", json={"prompt": [5] * 200, "max_tokens": 56})

    assert response.status_code == 200


async def test_the_default_max_tokens_gives_way_to_a_long_prompt(client, server):
    response = await client.post("/v1/completions", json={"prompt": [5] * 250})

    assert response.status_code == 200
    assert server.engine.added[0].sampling.max_tokens == 6


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("over", [1, 1500])
async def test_a_body_over_the_limit_is_a_413(serve, chunked, over):
    async with serve(max_body_bytes=1000) as server, httpx.AsyncClient(base_url=server.url) as client:
        body = json.dumps({"prompt": ""}).encode()
        body = body.replace(b'""', b'"' + b"x" * (1000 + over - len(body)) + b'"')

        async def parts():
            for start in range(0, len(body), 300):
                yield body[start : start + 300]

        response = await post(client, "/v1/completions", parts() if chunked else body)

        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]
        assert response.headers["connection"] == "close"
        assert await server.metric("lacunar_rejections_total", reason="too_large") == 1
        await check_unharmed(client, server)


async def test_a_body_at_the_limit_is_read(serve):
    async with serve(max_body_bytes=1000) as server, httpx.AsyncClient(base_url=server.url) as client:
        body = json.dumps({"prompt": "a", "user": ""}).encode()
        body = body.replace(b'""', b'"' + b"x" * (1000 - len(body)) + b'"')
        assert len(body) == 1000

        assert (await post(client, "/v1/completions", body)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/gpt-9", 404),
        ("GET", "/metrics/", 404),
        ("GET", "/docs", 404),
    ],
)
async def test_wrong_paths_and_methods_have_openais_shape(client, method, path, status):
    response = await client.request(method, path)

    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_unknown_fields_and_nulls_are_ignored(client):
    fields = {"prompt": "a", "metadata": {"a": 1}, "stop": None, "logit_bias": None, "n": None, "tools": []}
    response = await client.post("/v1/completions", json={**fields, "suffix": None, "best_of": 1})

    assert response.status_code == 200


async def test_a_full_queue_is_a_429_with_a_time_to_come_back(client, server):
    server.engine.capacity = 1
    response = await client.post("/v1/completions", json={"prompt": ["a", "b"]})

    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "queue_full"
    assert server.engine.added == []
    assert await server.metric("lacunar_rejections_total", reason="queue_full") == 1


async def test_a_rejected_request_is_counted_by_its_reason(client, server):
    await client.post("/v1/completions", json={"prompt": ""})
    await client.post("/v1/completions", json={"prompt": "a", "model": "x"})

    assert await server.metric("lacunar_rejections_total", reason="invalid") == 1
    assert await server.metric("lacunar_rejections_total", reason="model_not_found") == 1
    assert await server.metric("lacunar_requests_total", endpoint="completions") == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [2] * 33, "max_tokens": 1}, "prompt"),
        ({"prompt": [2] * 20, "max_tokens": 13}, "max_tokens"),
    ],
)
async def test_what_the_kv_cache_cannot_hold_is_refused(serve, fields, param):
    """The engine would give the sequence up in its middle, as a fault of the server."""
    async with (
        serve(context_tokens=256, kv_blocks=2) as server,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        response = await http.post("/v1/completions", json=fields)
        models = (await http.get("/v1/models")).json()

        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "32 tokens" in error["message"]
        assert models["data"][0]["max_model_len"] == 32
        await check_unharmed(http, server)
