"""Structured output: what a request asks for, as a grammar for the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from service.engine.grammar_client import Grammar, library_is_installed
from service.engine.grammar_compiler import GrammarKind
from service.errors import InvalidRequest

from .context import ServerContext
from .schemas import (
    ChatCompletionRequest,
    GenerationRequest,
    JsonObjectFormat,
    SchemaFormat,
)
from .tools import ToolFormat, forced_calls

# What the grammar library follows, by schema keyword, and what only annotates. It passes over any other
# keyword without a word, and then the output might not be what the client asked for.
_FOLLOWED = frozenset(
    ("type", "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
     "unevaluatedProperties", "minProperties", "maxProperties", "items", "prefixItems", "unevaluatedItems",
     "minItems", "maxItems", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions",
     "pattern", "format", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
     "exclusiveMaximum", "multipleOf")
)  # fmt: skip
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "example", "examples", "$schema", "$id", "$comment", "deprecated",
     "readOnly", "writeOnly", "strict", "discriminator", "nullable")
)  # fmt: skip
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMAS = ("additionalProperties", "propertyNames", "unevaluatedProperties", "items", "unevaluatedItems")
_MAX_DEPTH = 64


@dataclass(frozen=True)
class Wish:
    """A grammar that a request asks for, and the field that does."""

    field: str
    kind: GrammarKind
    source: str


async def compile_wish(
    context: ServerContext, request: GenerationRequest, tool_format: ToolFormat | None
) -> Grammar | None:
    """The grammar for a request's output, or None for free text.

    Raises:
        InvalidRequest: more than one is asked for, it cannot be used, or this server has no library for it.
        QueueFull: too many are being compiled.
    """
    wishes = list(_wishes(request))
    if isinstance(request, ChatCompletionRequest) and tool_format is not None:
        wishes += _wish_for_calls(request, tool_format)
    if not wishes:
        return None
    field = wishes[0].field
    if len(wishes) > 1:
        raise InvalidRequest(
            f"{field} and {wishes[1].field} both constrain the output; only one of them can", param=field
        )
    if request.ignore_eos or request.min_tokens:
        other = "ignore_eos" if request.ignore_eos else "min_tokens"
        raise InvalidRequest(
            f"{other} is not allowed together with {field}, which decides where the output ends", param=other
        )
    if not library_is_installed():
        raise InvalidRequest(
            f"{field} needs structured output, which this server was installed without "
            "(pip install 'lacunar[structured]')",
            param=field,
        )
    if not context.engine.info.eos_token_ids:
        raise InvalidRequest(
            f"{field} cannot be followed: this model has no token that ends a text", param=field
        )
    try:
        return await context.engine.compile_grammar(wishes[0].kind, wishes[0].source)
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error.message}", param=field) from error


def _wishes(request: GenerationRequest) -> Iterator[Wish]:
    format_ = request.response_format
    if isinstance(format_, JsonObjectFormat):
        yield _schema_wish("response_format", format_.json_schema or {"type": "object"})
    elif isinstance(format_, SchemaFormat):
        yield _schema_wish("response_format", format_.json_schema.json_schema)
    if request.json_schema is not None:
        yield _schema_wish("json_schema", request.json_schema)
    if request.guided_json is not None:
        yield _schema_wish("guided_json", request.guided_json)
    if request.guided_choice is not None:
        yield _choice_wish("guided_choice", request.guided_choice)
    for field in ("guided_regex", "guided_grammar", "grammar"):
        source = getattr(request, field)
        if source:
            yield Wish(field, "regex" if field == "guided_regex" else "grammar", source)
    structured = request.structured_outputs
    if structured is None:
        return
    name = "structured_outputs"
    if structured.json_schema is not None:
        yield _schema_wish(name, structured.json_schema)
    if structured.json_object:
        yield _schema_wish(name, {"type": "object"})
    if structured.choice is not None:
        yield _choice_wish(name, structured.choice)
    if structured.regex is not None:
        yield Wish(name, "regex", structured.regex)
    if structured.grammar is not None:
        yield Wish(name, "grammar", structured.grammar)


def _wish_for_calls(request: ChatCompletionRequest, tool_format: ToolFormat) -> list[Wish]:
    calls = forced_calls(request, tool_format)
    if calls is None:
        return []
    for index, tool in enumerate(request.tools or ()):
        check_schema(tool.function.parameters or {}, f"tools[{index}].function.parameters")
    return [Wish("tool_choice", "structural_tag", json.dumps(calls))]


def _schema_wish(field: str, schema: dict[str, Any] | str) -> Wish:
    if isinstance(schema, str):
        try:
            parsed = json.loads(schema)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{field} is no valid JSON", param=field) from None
        if not isinstance(parsed, dict):
            raise InvalidRequest(f"{field} must be a JSON object", param=field)
        schema = parsed
    check_schema(schema, field)
    return Wish(field, "json_schema", json.dumps(schema))


def _choice_wish(field: str, choices: list[str]) -> Wish:
    elements = [{"type": "const_string", "value": choice} for choice in dict.fromkeys(choices)]
    source = {"type": "structural_tag", "format": {"type": "or", "elements": elements}}
    return Wish(field, "structural_tag", json.dumps(source))


def check_schema(schema: Any, field: str) -> None:
    """Raises InvalidRequest where a JSON schema asks for what would be passed over."""
    pending: list[tuple[Any, str, int]] = [(schema, "", 0)]
    while pending:
        part, where, depth = pending.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise InvalidRequest(
                f"{field}: {where or 'the schema'} must be an object or a boolean", param=field
            )
        if depth > _MAX_DEPTH:
            raise InvalidRequest(f"{field}: the schema is nested more than {_MAX_DEPTH} deep", param=field)
        for keyword, value in part.items():
            here = f"{where}.{keyword}" if where else keyword
            if keyword not in _FOLLOWED:
                if keyword in _ANNOTATIONS or keyword.startswith("x-"):
                    continue
                raise InvalidRequest(
                    f"{field}: the schema keyword {here[:200]!r} is not supported", param=field
                )
            if keyword == "$ref" and not (isinstance(value, str) and value.startswith("#")):
                raise InvalidRequest(
                    f"{field}: {here[:200]!r} must point into the schema itself ('#/...')", param=field
                )
            if keyword == "allOf" and isinstance(value, list) and len(value) > 1:
                raise InvalidRequest(
                    f"{field}: {here[:200]!r} with more than one entry is not supported", param=field
                )
            if keyword in _OF_SCHEMAS and isinstance(value, dict):
                pending += [(inner, f"{here}.{name}", depth + 1) for name, inner in value.items()]
            elif keyword in _LISTS_OF_SCHEMAS and isinstance(value, list):
                pending += [(inner, f"{here}[{index}]", depth + 1) for index, inner in enumerate(value)]
            elif keyword in _SCHEMAS:
                inners = value if isinstance(value, list) else [value]
                pending += [(inner, here, depth + 1) for inner in inners]
