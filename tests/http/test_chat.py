"""`POST /v1/chat/completions` over a real socket."""

from __future__ import annotations

import json

import pytest

from .conftest import sse

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
RENDERED = "<|system|>be brief\n<|user|>hi\n<|assistant|>"


async def test_a_plain_answer_has_openais_shape(client, server):
    response = await client.post("/v1/chat/completions", json={"messages": MESSAGES})

    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "one two three four five", "refusal": None}
    assert choice["finish_reason"] == "stop"
    sent = server.engine.added[0]
    assert sent.prompt == server.engine.encode(RENDERED)
    # Without max_tokens the answer may fill the context.
    assert sent.sampling.max_tokens == 256 - len(sent.prompt)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_names_the_role_once_for_each_choice(client, n):
    request = {"messages": MESSAGES, "stream": True, "n": n}
    response = await client.post("/v1/chat/completions", json=request)

    *events, done = sse(response.text)
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["system_fingerprint"] for event in events}) == 1
    for index in range(n):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert not any("role" in choice["delta"] for choice in own[1:])
        assert "".join(c["delta"].get("content", "") for c in own) == "one two three four five"
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["stop"]


async def test_a_stream_names_the_role_although_its_first_token_shows_nothing(client, server):
    """A character of several tokens begins with one that gives no text yet."""
    server.engine.text = "🦊 fox"
    response = await client.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True})

    deltas = [event["choices"][0]["delta"] for event in sse(response.text)[:-1]]
    assert deltas[:2] == [{"role": "assistant", "content": ""}, {"content": "🦊"}]
    assert not any("role" in delta for delta in deltas[1:])


async def test_parts_names_and_developer_messages_reach_the_template(client, server):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None},
    ]
    assert (await client.post("/v1/chat/completions", json={"messages": messages})).status_code == 200

    rendered = "<|system|>be\nbrief\n<|user|>hi\n<|assistant|>\n<|assistant|>"
    assert server.engine.added[0].prompt == server.engine.encode(rendered)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit_work(client, field):
    body = (await client.post("/v1/chat/completions", json={"messages": MESSAGES, field: 2})).json()

    assert body["usage"]["completion_tokens"] == 2
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_carry_tokens_bytes_and_alternatives(client, server, stream):
    server.engine.text = "one 🦊"
    request = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "stream": stream}
    response = await client.post("/v1/chat/completions", json=request)

    if stream:
        content = [e for event in sse(response.text)[:-1] for e in event["choices"][0]["logprobs"]["content"]]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "one 🦊"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)
    assert {entry["top_logprobs"][1]["logprob"] for entry in content} == {-9999.0}


async def test_logprobs_without_top_logprobs_have_no_alternatives(client):
    body = (await client.post("/v1/chat/completions", json={"messages": MESSAGES, "logprobs": True})).json()

    assert all(entry["top_logprobs"] == [] for entry in body["choices"][0]["logprobs"]["content"])


async def test_what_the_template_refuses_is_the_clients_fault(client):
    messages = [{"role": "user", "content": "refuse me"}]
    response = await client.post("/v1/chat/completions", json={"messages": messages})

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert "this template refuses that" in error["message"]


async def test_a_model_without_a_template_says_which_endpoint_to_use(serve, checkpoint, tmp_path):
    import httpx

    from service.tokenization import Tokenizer

    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    async with serve() as server, httpx.AsyncClient(base_url=server.url) as client:
        server.context.tokenizer = Tokenizer.load(tmp_path)
        response = await client.post("/v1/chat/completions", json={"messages": MESSAGES})

    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]
