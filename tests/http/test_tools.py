"""Tool calls: offered to the template, found in the output however it is cut, forced by a grammar."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.api.tools import FORMATS, ToolCallParser, find_format
from service.tokenization import Tokenizer

from .conftest import sse
from .tiny_tokenizer import write_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function']['arguments'] | tojson }}"
    "</tool_call>{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tool_tokenizer(tmp_path_factory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tools") / "tiny"
    write_tokenizer(path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return Tokenizer.load(path)


@pytest.fixture
async def server(serve, tool_tokenizer):
    async with serve(context_tokens=2048) as running:
        running.context.tokenizer = tool_tokenizer
        yield running


async def ask(server, **fields) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        return await client.post(
            "/v1/chat/completions", json={"messages": MESSAGES, "tools": [TOOL, OTHER], **fields}
        )


def parse(text: str, cuts: list[int], name: str = "hermes", *, forced: bool = False):
    parser = ToolCallParser(FORMATS[name], ["weather", "time"], forced=forced)
    shown = ""
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in itertools.pairwise(borders):
        shown += parser.feed(text[begin:end])[0]
    shown += parser.flush()[0]
    return shown, [(call.function.name, json.loads(call.function.arguments)) for call in parser.calls]


WEATHER = ("weather", {"city": "Köln"})


@pytest.mark.parametrize(
    ("name", "text", "shown", "calls"),
    [
        ("hermes", "let me see " + CALL, "let me see ", [WEATHER]),
        ("hermes", CALL + "\n" + CALL, "", [WEATHER, WEATHER]),
        ("hermes", CALL[: -len("</tool_call>")], "", [WEATHER]),
        ("hermes", '<tool_call>[{"name": "time", "arguments": {}}]</tool_call>', "", [("time", {})]),
        ("hermes", "a < b and <tool", "a < b and <tool", []),
        ("hermes", "<tool_call>no json</tool_call>!", "<tool_call>no json</tool_call>!", []),
        ("hermes", '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
        ("hermes", '{"name": "weather"}', '{"name": "weather"}', []),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln"}}]', "", [WEATHER]),
        ("llama3", '{"name": "weather", "parameters": {"city": "Köln"}}', "", [WEATHER]),
        ("llama3", '<|python_tag|>{"name": "time", "parameters": {}}', "", [("time", {})]),
        ("llama3", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3", "plain words", "plain words", []),
    ],
)
@example(cuts=[10])  # the blank before a call comes with the call
@given(cuts=st.lists(st.integers(0, 180), max_size=8))
def test_calls_are_found_however_the_text_is_cut(name, text, shown, calls, cuts):
    assert parse(text, cuts, name) == (shown, calls)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (TEMPLATE, "hermes"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ('{{ tools }}<|start|>ipython "parameters"', "llama3"),
        ("{{ tools }}", None),
        ("<tool_call>", None),
    ],
)
def test_the_template_shows_how_calls_are_written(template, name):
    found = find_format(template)
    assert (None if found is None else found.name) == name


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_becomes_a_tool_call(server, stream):
    server.engine.text = "let me see " + CALL
    response = await ask(server, stream=stream)

    if stream:
        choices = [event["choices"][0] for event in sse(response.text)[:-1]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        assert [call.pop("index") for call in calls] == [0]
        reason = choices[-1]["finish_reason"]
    else:
        (choice,) = response.json()["choices"]
        text, calls = choice["message"]["content"], choice["message"]["tool_calls"]
        reason = choice["finish_reason"]
    assert text.strip() == "let me see"
    (call,) = calls
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    assert reason == "tool_calls"


async def test_a_call_alone_leaves_no_content(server):
    server.engine.text = CALL
    message = (await ask(server)).json()["choices"][0]["message"]

    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


async def test_the_template_sees_tools_and_the_conversations_calls(server, tool_tokenizer):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    await ask(server, messages=messages)

    prompt = tool_tokenizer.decode(server.engine.added[0].prompt)
    assert prompt.startswith('{"type": "function", "function": {"name": "weather"')
    assert '<tool_call>{"city": "Köln"}</tool_call>' in prompt
    assert prompt.endswith("<|tool|>rain<|end|><|assistant|>")


async def test_tool_choice_none_offers_nothing_and_looks_for_nothing(server, tool_tokenizer):
    server.engine.text = CALL
    message = (await ask(server, tool_choice="none")).json()["choices"][0]["message"]

    assert message["content"] == CALL
    assert "weather" not in tool_tokenizer.decode(server.engine.added[0].prompt)


@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        ("required", ["weather", "time"], "tool_calls"),
        ({"type": "function", "function": {"name": "weather"}}, ["weather"], "stop"),
    ],
)
async def test_a_forced_call_is_a_grammar(server, choice, names, reason):
    server.engine.text = CALL
    (answer,) = (await ask(server, tool_choice=choice)).json()["choices"]

    assert answer["finish_reason"] == reason
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"
    ((kind, source),) = server.engine.grammars
    assert kind == "structural_tag"
    assert [name for name in ("weather", "time") if f'\\"{name}\\"' in source] == names
    assert server.engine.added[0].sampling.grammar == 0


async def test_the_last_message_may_be_continued(server, tool_tokenizer):
    messages = [*MESSAGES, {"role": "assistant", "content": "I thin"}]
    await ask(server, messages=messages, tools=None, continue_final_message=True)
    await ask(server, tools=None, add_generation_prompt=False)

    first, second = (tool_tokenizer.decode(stream.prompt) for stream in server.engine.added)
    assert first.endswith("<|assistant|>I thin")
    assert second.endswith("<|user|>hi<|end|>")
