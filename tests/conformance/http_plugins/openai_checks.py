"""The official openai client against a real server; run by http_suites.py."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from lacunar_server import Server
from openai import AsyncOpenAI, OpenAI
from suite_results import NotApplicable

MODEL = "served"
KEY = "sk-right"
THREADS = os.environ["SUITE_THREADS"]
MESSAGES: list[Any] = [{"role": "user", "content": "Name a colour."}]
PROMPT = "The best way to learn a new language is to"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Colour(pydantic.BaseModel):
    """What the structured answers must be."""

    name: Literal["red", "green", "blue"]
    dark: bool


def start(*flags: str) -> Server:
    """A server with the flags that all checks share."""
    shared = ("--served-model-name", MODEL, "--api-key", KEY, "--threads", THREADS, "--max-model-len", "2048")
    return Server((*shared, "--kv-cache-bytes", str(2**28), *flags), log=Path(os.environ["SUITE_LOG"]))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start() as running:
        yield running


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """One sequence at a time, and no queue."""
    with start("--max-num-sequences", "1", "--max-queue", "0") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_completion(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.system_fingerprint
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer._request_id


@pytest.mark.parametrize("prompt", [[PROMPT, "Once"], [[1, 2, 3], [4, 5]], [504, 1450, 970]])
def test_every_form_of_prompt(client: OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0)
    assert len(answer.choices) == (1 if isinstance(prompt[0], int) else 2)
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))


def test_n_choices_are_reproducible_by_seed(client: OpenAI) -> None:
    texts = [
        [
            choice.text
            for choice in client.completions.create(
                model=MODEL, prompt=PROMPT, n=3, max_tokens=12, seed=5, temperature=1
            ).choices
        ]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_a_streamed_completion_is_the_plain_one(client: OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0)
    text, usage, reasons = "", None, []
    for event in client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in event.choices:
            text += choice.text
            reasons.append(choice.finish_reason)
        usage = event.usage
    assert text == plain.choices[0].text
    assert [reason for reason in reasons if reason] == ["length"]
    assert usage is not None
    assert plain.usage is not None
    assert usage.completion_tokens == plain.usage.completion_tokens


def test_echo_scores_the_prompt(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == PROMPT
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(logprobs.token_logprobs)


def test_stop_and_logit_bias(client: OpenAI) -> None:
    plain = (
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0).choices[0].text
    )
    stop = plain.split()[2]
    cut = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0, stop=[stop])
    assert cut.choices[0].text == plain[: plain.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    biased = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=3, temperature=0, logit_bias={"504": 100}, logprobs=0
    )
    assert len(set(biased.choices[0].logprobs.tokens)) == 1


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
    shown = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert shown.decode(errors="ignore").startswith(choice.message.content)


def test_chat_of_several_turns_and_parts(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Bye."},
        ],
        max_tokens=4,
        n=2,
    )
    assert len(answer.choices) == 2


def test_a_streamed_chat(client: OpenAI) -> None:
    events = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0, stream=True
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert [event.choices[0].finish_reason for event in events].count(None) == len(events) - 1
    plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0)
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == plain.choices[0].message.content


def test_the_stream_helper(client: OpenAI) -> None:
    # The helper takes an answer that was cut for an error, so this one must end by itself.
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, stop=[" "], extra_body={"include_stop_str_in_output": True}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content


def test_raw_and_streamed_responses(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().choices
    with client.completions.with_streaming_response.create(model=MODEL, prompt="a", max_tokens=1) as response:
        assert json.loads(response.read())["object"] == "text_completion"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_tool_call(client: OpenAI, choice: Any) -> None:
    try:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice=choice, max_tokens=96, temperature=0
        )
    except openai.BadRequestError as error:
        if "no place for tools" in error.message:
            raise NotApplicable("this model's chat template has no place for tools") from None
        raise
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    assert calls[0].function.name == "get_weather"
    assert json.loads(calls[0].function.arguments)["city"] in ("Paris", "Rome")


def test_tools_that_the_template_cannot_show_are_refused_by_name(client: OpenAI) -> None:
    template = (Path(os.environ["LACUNAR_MODEL"]) / "chat_template.jinja").read_text(encoding="utf-8")
    if "tools" in template:
        raise NotApplicable("this model's chat template has a place for tools")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL], max_tokens=4)
    assert caught.value.param == "tools"


def test_json_schema_through_parse(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Colour, max_tokens=64, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Colour)


def test_json_schema_through_the_stream_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Colour, max_tokens=64, temperature=0
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Colour)


def test_a_cut_json_answer_raises_the_clients_length_error(client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Colour, max_tokens=2)


def test_json_object(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Write an empty JSON object."}],
        response_format={"type": "json_object"},
        max_tokens=200,
        temperature=0,
    )
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("arguments", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": [-1]}, openai.BadRequestError, "prompt"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"logprobs": 99}, openai.BadRequestError, "logprobs"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"best_of": 4}, openai.BadRequestError, "best_of"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix"),
        ({"logit_bias": {"99999999": 1}}, openai.BadRequestError, "logit_bias"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_become_the_clients_exceptions(
    client: OpenAI, arguments: Any, kind: type[openai.APIStatusError], param: str, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": MODEL, "prompt": "a", "stream": stream, **arguments})
    assert caught.value.param == param
    assert caught.value.request_id
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_over_the_context_says_so(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 4000}])
    assert caught.value.code == "context_length_exceeded"
    assert "2048" in caught.value.message


@pytest.mark.parametrize("key", ["sk-wrong", "x"])
def test_a_wrong_key(server: Server, key: str) -> None:
    with OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as client:
        for call in (client.models.list, lambda: client.completions.create(model=MODEL, prompt="a")):
            with pytest.raises(openai.AuthenticationError):
                call()


def test_what_is_not_there(client: OpenAI) -> None:
    for call in (
        lambda: client.embeddings.create(model=MODEL, input="a"),
        lambda: client.responses.create(model=MODEL, input="a"),
        lambda: client.moderations.create(input="a"),
        lambda: client.files.list(),
    ):
        with pytest.raises(openai.NotFoundError):
            call()


def test_a_timeout_is_the_clients(server: Server) -> None:
    with OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(
                model=MODEL, prompt="a", max_tokens=1500, timeout=0.5, extra_body={"ignore_eos": True}
            )
        assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices


def test_nobody_listening_is_a_connection_error() -> None:
    client = OpenAI(base_url="http://127.0.0.1:9/v1", api_key=KEY, max_retries=0)
    with client, pytest.raises(openai.APIConnectionError):
        client.models.list()


async def _gather(url: str) -> None:
    async with AsyncOpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as client:
        plain = [client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)] * 1
        plain += [
            client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
            for _ in range(11)
        ]
        assert len({answer.choices[0].text for answer in await asyncio.gather(*plain)}) == 1
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=500, stream=True
        )
        async for _ in stream:
            break
        await stream.close()


def test_the_asynchronous_client(server: Server) -> None:
    asyncio.run(_gather(server.url))


def test_a_full_server_is_a_rate_limit_and_retries_get_through(narrow: Server) -> None:
    url = narrow.url + "/v1"
    with OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        stream = client.completions.create(
            model=MODEL, prompt="a", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt="b", max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        responses: list[int] = []
        retrying = client.with_options(max_retries=20)
        retrying._client.event_hooks["response"] = [lambda response: responses.append(response.status_code)]

        # The client waits as long as Retry-After says; at the second refusal the place becomes free.
        def leave(_: Any) -> None:
            if responses.count(429) == 2:
                stream.close()

        retrying._client.event_hooks["response"].append(leave)
        assert retrying.completions.create(model=MODEL, prompt="b", max_tokens=1).choices
        assert responses.count(429) >= 2
        assert responses[-1] == 200
