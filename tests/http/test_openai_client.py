"""The official `openai` package works against this server as it is."""

from __future__ import annotations

import asyncio

import openai as sdk
import pytest

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_completions(openai):
    answer = await openai.completions.create(model="tiny", prompt="a", max_tokens=64, logprobs=1)

    assert answer.choices[0].text == "one two three four five"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.top_logprobs[0]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_streamed_completions(openai):
    text, usage = "", None
    async for event in await openai.completions.create(
        model="tiny", prompt="a", max_tokens=64, stream=True, stream_options={"include_usage": True}
    ):
        text += "".join(choice.text for choice in event.choices)
        usage = event.usage
    assert text == "one two three four five"
    assert usage.completion_tokens > 1


async def test_chat(openai):
    answer = await openai.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=1
    )

    assert [choice.message.content for choice in answer.choices] == ["one two three four five"] * 2
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.25


async def test_streamed_chat_through_the_helper(openai):
    async with openai.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
        pieces = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()

    assert len(pieces) > 1
    assert "".join(pieces) == "one two three four five"
    assert final.choices[0].message.content == "one two three four five"


async def test_the_client_that_closes_a_stream_early_frees_the_sequence(openai, server):
    server.engine.gate = asyncio.Semaphore(3)
    stream = await openai.completions.create(model="tiny", prompt="a", max_tokens=64, stream=True)
    async for _ in stream:
        break
    await stream.close()

    async with asyncio.timeout(20):
        await server.engine.abort_seen.wait()
    assert server.engine.taken == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "param"),
    [
        ({"model": "other", "prompt": "a"}, sdk.NotFoundError, "model"),
        ({"model": "tiny", "prompt": ""}, sdk.BadRequestError, "prompt"),
        ({"model": "tiny", "prompt": "a", "max_tokens": 10_000}, sdk.BadRequestError, "max_tokens"),
        ({"model": "tiny", "prompt": "a", "temperature": -1}, sdk.BadRequestError, "temperature"),
    ],
)
async def test_errors_become_the_clients_exceptions(openai, arguments, kind, param):
    with pytest.raises(kind) as caught:
        await openai.completions.create(**arguments)

    assert caught.value.param == param
    assert caught.value.request_id


async def test_a_full_queue_is_a_rate_limit(openai, server):
    server.engine.capacity = 0

    with pytest.raises(sdk.RateLimitError):
        await openai.completions.create(model="tiny", prompt="a")


async def test_an_error_inside_a_stream_raises(openai, server):
    server.engine.error, server.engine.error_after = "the logits are not finite", 2
    stream = await openai.completions.create(model="tiny", prompt="a", stream=True)

    with pytest.raises(sdk.APIError, match="not finite"):
        async for _ in stream:
            pass


async def test_a_wrong_key_is_an_authentication_error(serve):
    async with serve(api_key="right") as server:
        async with sdk.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(sdk.AuthenticationError):
                await client.models.list()
        async with sdk.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            assert (await client.models.retrieve("tiny")).id == "tiny"
