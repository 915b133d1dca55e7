"""Faults known from other servers, one test each, in the order of the project's list of them.

Some behaviours have closer tests elsewhere; here each symptom can be found by its name.
"""

from __future__ import annotations

import asyncio
import json
import math

import httpx
import pytest
import torch

from service.engine.protocol import SamplingParams
from service.engine.sampler import Sampler
from service.engine.sequence import Sequence
from service.metrics import LATENCY_BUCKETS_SECONDS

from .conftest import sse

URL = "/v1/completions"


async def text_of(client: httpx.AsyncClient, **fields) -> str:
    response = await client.post(URL, json={"prompt": "a", "max_tokens": 64, **fields})
    if fields.get("stream"):
        return "".join(event["choices"][0]["text"] for event in sse(response.text)[:-1])
    return response.json()["choices"][0]["text"]


async def refused(client: httpx.AsyncClient, server, content: str | dict) -> dict:
    """The error of a request that must not reach the engine."""
    body = content if isinstance(content, str) else json.dumps(content)
    response = await client.post(URL, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert server.engine.added == []
    assert await text_of(client) == "one two three four five"
    return response.json()["error"]


async def test_stop_string_split_over_chunks_leaks(client):
    for stop in ("o three", "three f", " "):
        want = "one two three four five".partition(stop)[0]
        assert await text_of(client, stop=stop, stream=True) == want
        assert await text_of(client, stop=stop) == want


async def test_empty_first_chunks_with_stop(client):
    """Text that is held back gives no event, rather than an empty one."""
    response = await client.post(
        URL, json={"prompt": "a", "max_tokens": 64, "stop": ["one two threX"], "stream": True}
    )
    texts = [event["choices"][0]["text"] for event in sse(response.text)[:-1]]
    assert all(texts[:-1])
    assert "".join(texts) == "one two three four five"


async def test_invalid_utf_8_crashes(client, server):
    half = server.engine.encode("🦊")[:-1]
    server.engine.tokens = [*half, *server.engine.encode(" fox"), *half]
    for stream in (False, True):
        assert "fox" in await text_of(
            client, stream=stream, ignore_eos=True, max_tokens=len(server.engine.tokens)
        )
    response = await client.post(
        URL, content=b'{"prompt": "\xff\xfe"}', headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400


async def test_prompt_of_minus_one(client, server):
    assert "-1" in (await refused(client, server, {"prompt": [-1]}))["message"]


async def test_a_killed_clients_request_keeps_running(server):
    server.engine.gate = asyncio.Semaphore(2)
    reader, writer = await asyncio.open_connection(*server.address)
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await reader.readline()
    writer.transport.abort()
    await asyncio.wait_for(server.engine.abort_seen.wait(), 20)
    assert server.engine.taken == 0


@pytest.mark.parametrize("prompt", ["", [], [""], [[]]])
async def test_an_empty_prompt_kills_the_engine(client, server, prompt):
    assert "empty" in (await refused(client, server, {"prompt": prompt}))["message"]


async def test_echo_with_max_tokens_0(client):
    assert await text_of(client, echo=True, max_tokens=0) == "a"


async def test_logprobs_of_minus_infinity_are_not_json(client):
    """The scripted engine gives -inf to every second alternative."""
    response = await client.post(URL, json={"prompt": "a", "logprobs": 2})
    tops = response.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert all(math.isfinite(value) for top in tops for value in top.values())
    assert -9999.0 in tops[0].values()


async def test_logprobs_are_null_or_missing(client):
    for stream in (False, True):
        response = await client.post(URL, json={"prompt": "a", "logprobs": 0, "stream": stream})
        events = sse(response.text)[:-1] if stream else [response.json()]
        found = [event["choices"][0]["logprobs"] for event in events]
        values = [value for logprobs in found for value in logprobs["token_logprobs"]]
        assert values
        assert None not in values


async def test_echo_logprobs_only_for_generated_tokens(client, server):
    response = await client.post(
        URL, json={"prompt": "the quick fox", "echo": True, "logprobs": 1, "max_tokens": 2}
    )
    logprobs = response.json()["choices"][0]["logprobs"]
    prompt = len(server.engine.added[0].prompt)
    assert len(logprobs["token_logprobs"]) == prompt + 2
    assert logprobs["token_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]


@pytest.mark.parametrize("fields", [{"logit_bias": {"99999": 1}}, {"stop_token_ids": [99999]}])
async def test_logit_bias_or_stop_token_ids_out_of_the_vocabulary(client, server, fields):
    error = await refused(client, server, {"prompt": "a", **fields})
    assert error["param"] == next(iter(fields))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"0.5"', "1e400"])
async def test_temperature_of_nan_or_inf_or_a_string(client, server, value):
    await refused(client, server, f'{{"prompt": "a", "temperature": {value}}}')


async def test_temperature_of_1e9(client, server):
    assert (await refused(client, server, {"prompt": "a", "temperature": 1e9}))["param"] == "temperature"


async def test_a_float_as_top_k(client, server):
    assert (await refused(client, server, {"prompt": "a", "top_k": 1.5}))["param"] == "top_k"


async def test_prompt_and_max_tokens_over_the_context_with_wrong_numbers(client, server):
    error = await refused(client, server, {"prompt": [5] * 100, "max_tokens": 157})
    assert all(number in error["message"] for number in ("256", "100", "157", "257"))


def test_a_seed_is_ignored_when_a_batch_mate_has_none():
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(3))

    def draw(mates: int) -> list[int]:
        sampler = Sampler(50, torch.device("cpu"))
        seeds = [*[None] * mates, 7, *[None] * mates]
        sequences = [
            Sequence(str(i), [1], SamplingParams(max_tokens=99, seed=s)) for i, s in enumerate(seeds)
        ]
        return [sampler.sample(row.expand(len(sequences), -1), sequences)[mates].token for row in logits]

    assert draw(0) == draw(1) == draw(3)


async def test_wrong_completion_tokens_in_streamed_usage(client, server):
    for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        request = {"prompt": "a", "max_tokens": 4, "stream": True, "stream_options": options}
        *events, last, _ = sse((await client.post(URL, json=request)).text)
        assert last["usage"]["completion_tokens"] == 4
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 4
        if "continuous_usage_stats" in options:
            assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4]
    # vLLM's clients may set the second without the first, which then means nothing.
    request["stream_options"] = {"include_usage": False, "continuous_usage_stats": True}
    assert not any("usage" in event for event in sse((await client.post(URL, json=request)).text)[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_n_over_1_drops_choices(client, stream):
    response = await client.post(URL, json={"prompt": "a", "n": 5, "stream": stream})
    if stream:
        finished = [e["choices"][0] for e in sse(response.text)[:-1] if e["choices"][0]["finish_reason"]]
    else:
        finished = response.json()["choices"]
    assert sorted(choice["index"] for choice in finished) == list(range(5))


async def test_sigterm_aborts_streams(serve):
    """What the signal's handler sets; the signal itself is sent in test_end_to_end."""
    async with serve() as server:
        server.engine.gate = asyncio.Semaphore(1)
        request = {"prompt": "a", "stream": True}
        async with (
            httpx.AsyncClient(base_url=server.url) as client,
            client.stream("POST", URL, json=request) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            server.stop.set()
            for _ in range(50):
                server.engine.gate.release()
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest


def test_latency_buckets_that_end_at_60_s_or_start_at_300_ms():
    assert LATENCY_BUCKETS_SECONDS[0] <= 0.001
    assert LATENCY_BUCKETS_SECONDS[-1] >= 600
