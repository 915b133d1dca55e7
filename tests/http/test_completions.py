"""`POST /v1/completions` over a real socket."""

from __future__ import annotations

import pytest

from .conftest import sse


async def test_a_plain_completion_has_openais_shape(client, server):
    response = await client.post(
        "/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 64}
    )

    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {"index": 0, "text": "one two three four five", "logprobs": None, "finish_reason": "stop"}
    ]
    prompt, sent = len(server.engine.encode("hello")), server.engine.added[0]
    assert sent.prompt == server.engine.encode("hello")
    assert body["usage"]["prompt_tokens"] == prompt
    assert body["usage"]["completion_tokens"] == sent.produced
    assert body["usage"]["total_tokens"] == prompt + sent.produced
    assert response.headers["x-request-id"]


async def test_a_stream_carries_the_same_text_and_ends_with_done(client):
    request = {"prompt": "hello", "max_tokens": 64, "stream": True}
    response = await client.post("/v1/completions", json=request)

    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last = sse(response.text)
    assert last == "[DONE]"
    assert len(events) > 2
    assert "".join(event["choices"][0]["text"] for event in events) == "one two three four five"
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert all("usage" not in event for event in events)
    assert len({event["id"] for event in events}) == 1


async def test_usage_comes_last_in_a_stream_that_asks_for_it(client, server):
    request = {
        "prompt": "hello",
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *events, usage, done = sse((await client.post("/v1/completions", json=request)).text)

    assert done == "[DONE]"
    assert all(event["usage"] is None for event in events)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == server.engine.added[0].produced


async def test_max_tokens_ends_with_length(client, server):
    body = (await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})).json()

    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3
    assert server.engine.text.startswith(body["choices"][0]["text"])


async def test_max_tokens_defaults_to_16_and_the_checkpoints_sampling_defaults_apply(client, server):
    await client.post("/v1/completions", json={"prompt": "hello"})

    sampling = server.engine.added[0].sampling
    assert sampling.max_tokens == 16
    assert sampling.top_k == 7
    assert sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("prompt", "sequences"),
    [
        ("a", 1),
        (["a", "b"], 2),
        ([5, 6, 7], 1),
        ([[5, 6], [7]], 2),
    ],
)
async def test_all_four_forms_of_prompts(client, server, prompt, sequences):
    response = await client.post("/v1/completions", json={"prompt": prompt})

    assert response.status_code == 200
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(sequences))
    if isinstance(prompt[0], list):
        assert [stream.prompt for stream in server.engine.added] == prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_of_several_prompts_come_in_order(client, server, stream):
    request = {"prompt": ["a", "b"], "n": 2, "seed": 5, "max_tokens": 64, "stream": stream}
    response = await client.post("/v1/completions", json=request)

    texts = dict.fromkeys(range(4), "")
    if stream:
        for event in sse(response.text)[:-1]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        texts = {choice["index"]: choice["text"] for choice in response.json()["choices"]}
        # Each prompt counts once.
        assert response.json()["usage"]["prompt_tokens"] == 2
    assert texts == dict.fromkeys(range(4), "one two three four five")
    assert [s.prompt for s in server.engine.added] == [server.engine.encode(p) for p in "aabb"]
    assert [s.sampling.seed for s in server.engine.added] == [5, 6, 5, 6]
    assert server.engine.taken == 0


async def test_sampling_parameters_reach_the_engine(client, server):
    request = {
        "prompt": "a",
        "max_tokens": 5,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "seed": -1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100, "6": 2.5},
        "stop_token_ids": [9],
        "ignore_eos": True,
        "logprobs": 2,
    }
    assert (await client.post("/v1/completions", json=request)).status_code == 200

    sampling = server.engine.added[0].sampling
    assert sampling.max_tokens == 5
    assert sampling.min_tokens == 2
    assert sampling.temperature == 0.5
    assert sampling.top_p == 0.9
    assert sampling.top_k == 3
    assert sampling.min_p == 0.1
    assert sampling.seed == 2**63 - 1
    assert sampling.presence_penalty == 1.0
    assert sampling.frequency_penalty == -1.0
    assert sampling.repetition_penalty == 1.2
    assert sampling.logit_bias == {5: -100.0, 6: 2.5}
    assert sampling.stop_token_ids == (9,)
    assert sampling.ignore_eos
    assert sampling.logprobs == 2
    assert sampling.prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [
        ("three", False, "one two "),
        (["three", "two th"], False, "one "),
        ("e two t", False, "on"),
        ("three", True, "one two three"),
        ("zzz", False, "one two three four five"),
        ("five six", False, "one two three four five"),
        ("one", False, ""),
    ],
)
async def test_stop_strings_end_the_text_and_never_leak(client, server, stop, include, text, stream):
    request = {
        "prompt": "a",
        "stop": stop,
        "include_stop_str_in_output": include,
        "max_tokens": 64,
        "stream": stream,
    }
    response = await client.post("/v1/completions", json=request)

    if stream:
        events = sse(response.text)[:-1]
        pieces = [event["choices"][0] for event in events]
        assert "".join(piece["text"] for piece in pieces) == text
        assert pieces[-1]["finish_reason"] == "stop"
        assert all(piece["text"] for piece in pieces[:-1]), "an empty event in the middle"
    else:
        assert response.json()["choices"][0]["text"] == text
        assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert server.engine.taken == 0


async def test_a_stop_string_before_min_tokens_is_passed_over(client, server):
    first = server.engine.encode("one two three")
    request = {"prompt": "a", "stop": "two", "min_tokens": len(first), "max_tokens": 64}
    server.engine.text = "one two three four five two"
    body = (await client.post("/v1/completions", json=request)).json()

    assert body["choices"][0]["text"] == "one two three four five "


async def test_a_character_of_many_tokens_is_never_split(client, server):
    server.engine.text = "naïve 🦊 日本語 ok"
    assert len(server.engine.encode("🦊")) > 1
    response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 99, "stream": True})

    pieces = [event["choices"][0]["text"] for event in sse(response.text)[:-1]]
    assert "".join(pieces) == server.engine.text
    assert not any("\ufffd" in piece for piece in pieces)


async def test_bytes_that_are_no_text_become_replacement_characters(client, server):
    emoji = server.engine.encode("🦊")
    server.engine.tokens = [*server.engine.encode("a "), emoji[-1], *server.engine.encode("b"), emoji[0]]
    body = (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 64})).json()

    assert body["choices"][0]["text"].count("\ufffd") == 2
    assert body["choices"][0]["text"].startswith("a ")


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_align_with_the_text(client, server, stream):
    request = {"prompt": "a", "logprobs": 2, "max_tokens": 64, "stream": stream}
    response = await client.post("/v1/completions", json=request)

    if stream:
        parts = [event["choices"][0]["logprobs"] for event in sse(response.text)[:-1]]
        logprobs = {key: [x for part in parts for x in part[key]] for key in parts[0]}
    else:
        logprobs = response.json()["choices"][0]["logprobs"]
    text = "one two three four five"
    # The token that ended the sequence has no text but a place in the list, as it is counted in the usage:
    # scoring clients drop the last entry, and would drop one of the prompt's with echo.
    assert "".join(logprobs["tokens"]) == text + "</s>"
    assert logprobs["token_logprobs"] == [-0.25] * len(logprobs["tokens"])
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"][:-1], strict=True):
        assert text[offset:].startswith(token)
    assert logprobs["text_offset"][-1] == len(text)
    # An impossible alternative is -inf in the engine, which JSON cannot say.
    assert all(-9999.0 in top.values() for top in logprobs["top_logprobs"])


async def test_every_counted_token_has_a_logprob(client, server):
    """lm-eval takes the prompt's logprobs to be all but the last, also where the one new token is the end."""
    server.engine.text = ""
    request = {"prompt": "hi there", "echo": True, "logprobs": 1, "max_tokens": 1}
    body = (await client.post("/v1/completions", json=request)).json()

    assert body["usage"]["completion_tokens"] == 1
    assert len(body["choices"][0]["logprobs"]["token_logprobs"]) == body["usage"]["total_tokens"]


async def test_logprobs_stop_where_a_stop_string_cuts_the_text(client):
    request = {"prompt": "a", "logprobs": 0, "stop": " three", "max_tokens": 64}
    choice = (await client.post("/v1/completions", json=request)).json()["choices"][0]

    assert choice["text"] == "one two"
    assert "".join(choice["logprobs"]["tokens"]) == "one two"


async def test_parts_of_a_character_are_reported_as_bytes(client, server):
    server.engine.text = "🦊"
    choice = (
        await client.post("/v1/completions", json={"prompt": "a", "logprobs": 0, "max_tokens": 9})
    ).json()["choices"][0]

    assert choice["text"] == "🦊"
    raw = "".join(token.removeprefix("bytes:") for token in choice["logprobs"]["tokens"])
    assert raw == "\\xf0\\x9f\\xa6\\x8a</s>"


@pytest.mark.parametrize("prompt", ["hello there", [10, 11, 12]])
async def test_echo_without_new_tokens_returns_the_prompt_and_its_logprobs(client, server, tokenizer, prompt):
    request = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1}
    body = (await client.post("/v1/completions", json=request)).json()

    ids = prompt if isinstance(prompt, list) else tokenizer.encode(prompt)
    choice = body["choices"][0]
    text = prompt if isinstance(prompt, str) else tokenizer.decode(ids)
    assert choice["text"] == text
    assert choice["finish_reason"] == "length"
    assert "".join(choice["logprobs"]["tokens"]) == text
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.25] * (len(ids) - 1)
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert body["usage"]["completion_tokens"] == 0
    assert server.engine.added[0].sampling.prompt_logprobs == 1


async def test_echo_without_tokens_or_logprobs_needs_no_engine(client, server):
    body = (await client.post("/v1/completions", json={"prompt": "hi", "echo": True, "max_tokens": 0})).json()

    assert body["choices"][0]["text"] == "hi"
    assert server.engine.added == []
    assert server.engine.taken == 0


async def test_echo_puts_the_prompt_before_the_output(client):
    request = {"prompt": "hi ", "echo": True, "max_tokens": 64, "logprobs": 0, "stop": "three"}
    choice = (await client.post("/v1/completions", json=request)).json()["choices"][0]

    assert choice["text"] == "hi one two "
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    # The cut goes through the token " three", whose beginning is in the text.
    assert "".join(choice["logprobs"]["tokens"]) == "hi one two three"


async def test_one_sequences_failure_is_its_own(client, server):
    server.engine.error = "the logits are not finite"
    server.engine.error_after = 2
    failed = await client.post("/v1/completions", json={"prompt": "a"})
    server.engine.error = None
    good = await client.post("/v1/completions", json={"prompt": "a"})

    assert failed.status_code == 500
    assert failed.json()["error"]["message"] == "the logits are not finite"
    assert good.status_code == 200


async def test_an_error_inside_a_stream_is_an_event(client, server):
    server.engine.error = "the logits are not finite"
    server.engine.error_after = 2
    response = await client.post("/v1/completions", json={"prompt": "a", "stream": True})

    assert response.status_code == 200
    events = sse(response.text)
    assert events[-1]["error"]["message"] == "the logits are not finite"
    assert "[DONE]" not in events


async def test_a_bug_is_a_500_that_names_the_request_and_nothing_else(client, server):
    server.engine.bug = KeyError("/secret/path")
    headers = {"X-Request-Id": "abc-1"}
    response = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)

    assert response.status_code == 500
    assert response.headers["x-request-id"] == "abc-1"
    assert "abc-1" in response.json()["error"]["message"]
    assert "secret" not in response.text
    assert "KeyError" not in response.text
    server.engine.bug = None
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
