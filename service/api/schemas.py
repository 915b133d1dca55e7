"""Bodies of requests and answers, in OpenAI's shapes. Every number of a request is bounded here.

Fields that OpenAI, vLLM and llama.cpp know but this server cannot honour are refused when they ask for
something; fields nobody knows are ignored, as clients send many that concern them alone.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

# Beyond any model's context; the exact limit is checked against the prompt's length.
MAX_TOKENS_BOUND = 2**31 - 1
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_TOOLS = 128
MAX_NAME = 128
# A logit divided by much less overflows float32, and the sequence fails in the engine.
MIN_REPETITION_PENALTY = 0.01

Prompt: TypeAlias = str | list[int]


def _check_token_ids(ids: list[Any], where: str) -> None:
    if not ids:
        raise ValueError(f"{where} is empty; at least one token is needed")
    for index, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise ValueError(f"{where}[{index}] is {_kind(token_id)}, but a token id is an integer")


def _check_prompt(value: Any) -> Any:
    """One list of prompts, each a string or a list of token ids, from the four forms OpenAI allows."""
    # By hand: pydantic would report one error for each list element and member of the union.
    if isinstance(value, str):
        value = [value]
    elif not isinstance(value, list):
        raise ValueError(f"expected a string, a list of strings, or token ids, but got {_kind(value)}")
    elif value and type(value[0]) is int:
        _check_token_ids(value, "prompt")
        return [value]
    if not value:
        raise ValueError("the list is empty; at least one prompt is needed")
    for index, prompt in enumerate(value):
        where = f"prompt[{index}]" if len(value) > 1 else "prompt"
        if isinstance(prompt, list) and isinstance(value[0], list):
            _check_token_ids(prompt, where)
        elif not (isinstance(prompt, str) and isinstance(value[0], str)):
            raise ValueError(
                f"{where} is {_kind(prompt)}, but prompts are all strings or all lists of token ids"
            )
        elif not prompt:
            raise ValueError(f"{where} is empty; at least one character is needed")
    return value


def _check_stop(value: Any) -> list[str]:
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("expected a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop strings, but at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise ValueError(
                f"a stop string has {len(stop)} characters, but 1 to {MAX_STOP_CHARACTERS} are allowed"
            )
    return stops


def _check_logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"expected an object from token id to bias, but got {_kind(value)}")
    if len(value) > MAX_BIASES:
        raise ValueError(f"{len(value)} entries, but at most {MAX_BIASES} are allowed")
    biases = {}
    for key, bias in value.items():
        # isdecimal alone also takes digits of other scripts.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise ValueError(f"key {_shorten(key)!r} is no token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "..."


PromptField = Annotated[
    list[Prompt],
    BeforeValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                },
            ]
        }
    ),
]
StopField = Annotated[
    list[str],
    BeforeValidator(_check_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
                {
                    "type": "array",
                    "maxItems": MAX_STOPS,
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
                },
            ]
        }
    ),
]
LogitBiasField = Annotated[
    dict[int, float],
    BeforeValidator(_check_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "maxProperties": MAX_BIASES,
                    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
            ]
        }
    ),
]
JsonSchema: TypeAlias = dict[str, Any]
Choices: TypeAlias = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(min_length=1, max_length=1024)
]
TokenIdList = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_BIASES)]


class _Body(BaseModel):
    """Strict: `"0.5"`, `true` or `1.0` are no integers. JSON's NaN and Infinity extensions are refused."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", protected_namespaces=())


class StreamOptions(_Body):
    """`stream_options` of a streamed request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="Usage so far in every event; means nothing without include_usage, as in vLLM."
    )


class JsonSchemaFormat(_Body):
    """`response_format.json_schema`: a schema and a name that only documents it."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: JsonSchema = Field(alias="schema")


class TextFormat(_Body):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(_Body):
    """Some JSON object; with a schema (llama.cpp's way) one that it describes."""

    type: Literal["json_object"]
    json_schema: JsonSchema | None = Field(None, alias="schema")


class SchemaFormat(_Body):
    """JSON as the schema describes it."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat: TypeAlias = Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Discriminator("type")]


class StructuredOutputs(_Body):
    """`structured_outputs`, vLLM's name for the same: exactly one of these."""

    json_schema: JsonSchema | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


# Known elsewhere, not here: refused unless absent, null or empty, so that nobody believes they worked.
_UNSUPPORTED = {
    "allowed_token_ids": "a list of allowed tokens is not supported; use logit_bias or a grammar",
    "audio": "audio is not supported",
    "bad_words": "bad_words is not supported; use logit_bias",
    "chat_template": "templates of clients are not run; the model's own is used",
    "function_call": "this older form is not supported; use tools and tool_choice",
    "functions": "this older form is not supported; use tools and tool_choice",
    "prediction": "predicted outputs are not supported",
    "prompt_embeds": "embeddings as prompts are not supported",
    "prompt_logprobs": "prompt_logprobs is not supported; completions give them with echo and logprobs",
    "suffix": "inserting text before a suffix is not supported by this server's models",
    "truncate_prompt_tokens": "prompts are never cut",
    "use_beam_search": "beam search is not supported",
}


class GenerationRequest(_Body):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="Name of the served model; may be left out.")
    n: int | None = Field(None, ge=1, le=1024, description="Choices for each prompt.")
    best_of: int | None = Field(None, ge=1, le=1024, description="Only the value of `n` is supported.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=100, description="0 picks the likeliest token.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS_BOUND, description="0 and -1 switch it off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=100)
    logit_bias: LogitBiasField = Field(default_factory=dict)
    stop: StopField = Field(default_factory=list)
    include_stop_str_in_output: bool | None = None
    stop_token_ids: TokenIdList | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="false also shows special tokens.")
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_BOUND)
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_BOUND)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = Field(None, description="As structured_outputs.json.")
    guided_regex: str | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: Choices | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="As structured_outputs.grammar.")
    json_schema: JsonSchema | None = Field(None, description="As structured_outputs.json (llama.cpp).")
    grammar: str | None = Field(None, description="As structured_outputs.grammar (llama.cpp).")
    user: str | None = Field(None, description="Accepted and not used.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, reason in _UNSUPPORTED.items():
                if data.get(name):
                    raise FieldError(name, reason)
        return data

    @model_validator(mode="after")
    def _check_combinations(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "only allowed together with stream: true")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldError(
                "best_of", f"best_of is {self.best_of}, but only the value of n ({self.n or 1}) is supported"
            )
        return self


class FieldError(ValueError):
    """A rule over several fields, reported under the name of one of them."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: PromptField
    echo: bool | None = Field(None, description="Put the prompt before the output.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Alternatives to report beside each token."
    )


class TextPart(_Body):
    """A part of a message's content; only text is understood."""

    type: Literal["text"]
    text: str


# Told apart by type, so that an error speaks of the form that was sent. The tags are no identifiers: that is
# how errors.from_validation knows them from fields.
Content: TypeAlias = Annotated[
    Annotated[str, Tag("as-text")] | Annotated[list[TextPart], Field(min_length=1), Tag("as-parts")],
    Discriminator(lambda content: "as-parts" if isinstance(content, list) else "as-text"),
]


class FunctionCall(_Body):
    """A call that the model made earlier in the conversation."""

    name: str = Field(min_length=1, max_length=MAX_NAME)
    arguments: str | dict[str, Any] = Field("{}", description="JSON, as text or as an object.")


class MessageToolCall(_Body):
    """An entry of an assistant message's `tool_calls`."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = Field(None, description="Of an assistant's message.")
    tool_call_id: str | None = Field(None, description="Of a tool's message: the call that it answers.")

    def for_template(self) -> dict[str, Any]:
        """The form chat templates expect: text content, the roles that they know, arguments as objects."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content or "",
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _as_object(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return message


def _as_object(arguments: str | dict[str, Any]) -> Any:
    """Templates write arguments with `tojson`, which would quote a text once more."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments


class FunctionDefinition(_Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]+$", max_length=MAX_NAME)
    description: str | None = None
    parameters: JsonSchema | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = None


class Tool(_Body):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(_Body):
    """The name in a `tool_choice`."""

    name: str


class NamedToolChoice(_Body):
    """`tool_choice` of one function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("as-word")]
    | Annotated[NamedToolChoice, Tag("as-named")],
    Discriminator(lambda choice: "as-named" if isinstance(choice, dict | NamedToolChoice) else "as-word"),
]


class TemplateFields(_Body):
    """What decides how a conversation becomes a prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool | None = Field(
        None, description="Begin the assistant's answer; default true, false with continue_final_message."
    )
    continue_final_message: bool | None = Field(None, description="The output continues the last message.")
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = Field(None, description="Default auto where there are tools.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the template.")

    @model_validator(mode="after")
    def _check_template_fields(self) -> TemplateFields:
        self.check()
        return self

    def check(self) -> None:
        """Raises FieldError for fields that do not go together."""
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError(
                "continue_final_message", "not allowed together with add_generation_prompt: true"
            )
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise FieldError("tools", "two functions have the same name")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise FieldError("tool_choice", f"tools has no function {self.tool_choice.function.name[:80]!r}")
        if self.tool_choice == "required" and not names:
            raise FieldError("tool_choice", "required needs at least one entry in tools")

    def template_variables(self) -> dict[str, Any]:
        """Arguments for `Tokenizer.apply_chat_template`, beside the messages."""
        generation_prompt = self.add_generation_prompt
        offered = self.tools if self.tool_choice != "none" else None
        return {
            "add_generation_prompt": (
                not self.continue_final_message if generation_prompt is None else generation_prompt
            ),
            "continue_final_message": bool(self.continue_final_message),
            "tools": [tool.model_dump(exclude_none=True) for tool in offered] if offered else None,
            "variables": self.chat_template_kwargs or {},
        }


class ChatCompletionRequest(TemplateFields, GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_BOUND)
    parallel_tool_calls: bool | None = Field(None, description="false allows one call at most.")

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "only allowed together with logprobs: true")
        return self


class TokenizeRequest(_Body):
    """Body of `POST /tokenize`: `prompt` or `messages` (vLLM's form), or `content` (llama.cpp's)."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="Of a prompt; default true.")
    add_special: bool | None = Field(None, description="Of a content; default false.")
    return_token_strs: bool | None = None
    with_pieces: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_form(self) -> TokenizeRequest:
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise FieldError("prompt", "exactly one of prompt, messages and content is needed")
        if self.messages is not None:
            self.template_fields().check()
        return self

    def template_fields(self) -> TemplateFields:
        """The part of a request with messages that the template needs."""
        assert self.messages is not None
        return TemplateFields.model_construct(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            tools=self.tools,
            tool_choice=None,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeRequest(_Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[Any]

    @model_validator(mode="after")
    def _check_tokens(self) -> DetokenizeRequest:
        if self.tokens:
            try:
                _check_token_ids(self.tokens, "tokens")
            except ValueError as error:
                raise FieldError("tokens", str(error)) from None
        return self


# Answers


class PromptTokensDetails(BaseModel):
    """How much of the prompt came from the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of a request; `completion_tokens` includes the token that ended a sequence."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Log probabilities token by token; `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continuation, or in a stream a piece of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(BaseModel):
    """Answer of `POST /v1/completions`, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A likely token at one place; `bytes` are the token's own, also where they are no whole character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """The token that was chosen, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of a message's tokens."""

    content: list[ChatTokenLogprob]


class CalledFunction(BaseModel):
    """The function that the model calls, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One call of a function."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(BaseModel):
    """What the model said; `content` is null where it only called functions."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = Field(None, exclude_if=lambda calls: calls is None)


class ChatChoice(BaseModel):
    """One answer of the model."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(BaseModel):
    """Answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ToolCallDelta(ToolCall):
    """A call in a stream, whole; `index` is its place among the message's calls."""

    index: int


class ChatDelta(BaseModel):
    """What a streamed event adds to the message; unset fields are left out of the event."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletionChunk(BaseModel):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lacunar"
    max_model_len: int


class ModelList(BaseModel):
    """Answer of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    """What went wrong; `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is not 2xx."""

    error: ErrorDetail


class TokenPiece(BaseModel):
    """A token and what it stands for: its text, or its bytes where they are no text."""

    id: int
    piece: str | list[int]


class Tokens(BaseModel):
    """Answer of `POST /tokenize`."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Text(BaseModel):
    """Answer of `POST /detokenize`, under both servers' names."""

    prompt: str
    content: str


class Load(BaseModel):
    """Answer of `GET /load`: requests being answered, and the engine's sequences."""

    server_load: int
    running: int
    waiting: int


class Version(BaseModel):
    """Answer of `GET /version`."""

    version: str
    model: str
    architecture: str
    implementation: str
    device: str
    dtype: str
    build: dict[str, str]


class Health(BaseModel):
    """Answer of `/livez`, `/readyz` and `/health`."""

    status: str
    reason: str | None = None
