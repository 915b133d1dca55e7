"""Tool calls: how a model writes them, found in its output as it streams, and forced where asked for."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from service.errors import InvalidRequest
from service.tokenization import Tokenizer

from .schemas import CalledFunction, ChatCompletionRequest, NamedToolChoice, Tool, ToolCall

ToolFormatName = Literal["hermes", "llama3", "mistral"]


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes a call.

    Attributes:
        name: for settings and messages.
        begin: what announces calls.
        end: what ends them, or "" where they go on to the end of the output.
        arguments: the JSON key beside "name".
        bare: the announcement may be missing, and the output be the call alone.
    """

    name: ToolFormatName
    begin: str
    end: str
    arguments: Literal["arguments", "parameters"]
    bare: bool = False


# hermes: Qwen, Hermes, SmolLM: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one after the other.
# mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
# llama3: {"name": ..., "parameters": {...}}, sometimes after <|python_tag|>.
FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments"),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments"),
    "llama3": ToolFormat("llama3", "<|python_tag|>", "", "parameters", bare=True),
}


def find_format(template: str) -> ToolFormat | None:
    """The way of writing calls that a chat template teaches, by the marks in it; None if there is none."""
    if "tools" not in template:
        return None
    for name in ("hermes", "mistral"):
        if FORMATS[name].begin in template:
            return FORMATS[name]
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return FORMATS["llama3"]
    return None


def tool_format_for(request: ChatCompletionRequest, tokenizer: Tokenizer, setting: str) -> ToolFormat | None:
    """How calls in the output to this request are written; None where they are not looked for.

    Raises:
        InvalidRequest: there are tools, but the model's template has no place for them.
    """
    if not request.tools or request.tool_choice == "none":
        return None
    template = tokenizer.template_text(with_tools=True)
    if "tools" not in template:
        raise InvalidRequest("this model's chat template has no place for tools", param="tools")
    found = find_format(template) if setting == "auto" else FORMATS.get(setting)
    if found is None and request.tool_choice not in (None, "auto"):
        raise InvalidRequest(
            "this model's chat template writes tool calls in no way known here, so none can be forced",
            param="tool_choice",
        )
    return found


def is_forced(request: ChatCompletionRequest) -> bool:
    """Whether the output must be calls and nothing else."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedToolChoice)


def forced_calls(request: ChatCompletionRequest, tool_format: ToolFormat) -> dict[str, Any] | None:
    """The grammar of an output that is calls and nothing else; None where the model may choose."""
    if not is_forced(request):
        return None
    tools = request.tools or []
    one = request.parallel_tool_calls is False or tool_format.name == "llama3"
    if isinstance(request.tool_choice, NamedToolChoice):
        tools = [tool for tool in tools if tool.function.name == request.tool_choice.function.name]
        one = True
    before, between, after = {
        "hermes": ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
        # The mark is one special token, which no grammar over text can ask for: the list alone says as much.
        "mistral": ("[", ", ", "]"),
        "llama3": ("", "", ""),
    }[tool_format.name]
    calls = {
        "type": "tags_with_separator",
        "separator": between,
        "at_least_one": True,
        "stop_after_first": one,
        "tags": [_tag(tool, tool_format) for tool in tools],
    }
    if not before:
        return {"type": "structural_tag", "format": calls}
    parts = [{"type": "const_string", "value": before}, calls, {"type": "const_string", "value": after}]
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}


def _tag(tool: Tool, tool_format: ToolFormat) -> dict[str, Any]:
    function = tool.function
    return {
        "type": "tag",
        "begin": f'{{"name": {json.dumps(function.name)}, "{tool_format.arguments}": ',
        "content": {
            "type": "json_schema",
            "json_schema": function.parameters or {"type": "object"},
            "max_whitespace_cnt": 20,
        },
        "end": "}",
    }


class ToolCallParser:
    """Tells calls from text in output that arrives in pieces. What may still become a call is held back.

    A piece that looks like a call and is none in the end (no JSON, no name, a function that was not offered)
    comes out as the text it was. Blank text between calls and at the end, after a call, is dropped.

    Args:
        tool_format: how calls are written.
        names: the functions that were offered.
        forced: the output is calls from its first character on.
    """

    def __init__(self, tool_format: ToolFormat, names: Sequence[str], *, forced: bool = False) -> None:
        self._format = tool_format
        self._names = frozenset(names)
        self._bare = forced or tool_format.bare
        self._held = ""
        self._inside = False
        self._started = False
        self._after_call = False
        self._blank = ""
        self.calls: list[ToolCall] = []

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take the next piece; returns the text to show and the calls that are complete."""
        self._held += text
        shown = ""
        found: list[ToolCall] = []
        while True:
            if self._inside:
                end = self._held.find(self._format.end) if self._format.end else -1
                if end < 0:
                    break
                block = self._held[:end]
                self._held = self._held[end + len(self._format.end) :]
                self._inside = False
                before = len(found)
                shown += self._visible(
                    self._take(block, found, self._format.begin + block + self._format.end)
                )
                if len(found) > before:
                    self._after_call, self._blank = True, ""
                continue
            begin = self._held.find(self._format.begin)
            if begin >= 0:
                shown += self._visible(self._held[:begin])
                self._held = self._held[begin + len(self._format.begin) :]
                self._inside, self._bare = True, False
                continue
            if self._bare and not self._started:
                start = self._held.lstrip()
                if not start or start[0] in "{[":
                    break  # the whole output may be a call; its end decides
            keep = _open_suffix(self._held, self._format.begin)
            cut = len(self._held) - keep
            shown += self._visible(self._held[:cut])
            self._held = self._held[cut:]
            break
        return shown, found

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The output is complete."""
        held, self._held = self._held, ""
        found: list[ToolCall] = []
        if self._inside:
            shown = self._take(held, found, self._format.begin + held)
        elif self._bare and not self._started and held.lstrip()[:1] in ("{", "["):
            shown = self._take(held, found, held)
        else:
            shown = held
        return self._visible(shown), found

    def _visible(self, text: str) -> str:
        # Blank text after a call waits for what comes next: before a word it is shown, else dropped.
        if self._after_call:
            text, self._blank = self._blank + text, ""
            if not text.strip():
                self._blank = text
                return ""
            self._after_call = False
        self._started = self._started or bool(text)
        return text

    def _take(self, block: str, found: list[ToolCall], written: str) -> str:
        """The calls of a block, or the text it is if they are none."""
        calls = self._read(block)
        if calls is None:
            return written
        found += calls
        self.calls += calls
        return ""

    def _read(self, block: str) -> list[ToolCall] | None:
        values = _json_values(block)
        if not values:
            return None
        calls = []
        for value in values:
            if not isinstance(value, dict) or value.get("name") not in self._names:
                return None
            arguments = value.get("arguments", value.get("parameters", {}))
            if not isinstance(arguments, dict):
                return None
            function = CalledFunction(name=value["name"], arguments=json.dumps(arguments, ensure_ascii=False))
            calls.append(ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=function))
        return calls


def _json_values(text: str) -> list[Any] | None:
    """The JSON values in a text, one after the other (some models part them by `;`); lists are opened."""
    decode = json.JSONDecoder(parse_constant=_no_constant).raw_decode
    values: list[Any] = []
    position = 0
    while position < len(text):
        if text[position] in " \t\r\n;":
            position += 1
            continue
        try:
            value, position = decode(text, position)
        except (ValueError, RecursionError):
            return None
        values += value if isinstance(value, list) else [value]
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _open_suffix(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins, but does not complete, `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
