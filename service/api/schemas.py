"""Bodies of requests and answers, in OpenAI's shapes. Every number of a request is bounded here.

Fields that OpenAI, vLLM and llama.cpp know but this server cannot honour are refused when they ask for
something; fields nobody knows are ignored, as clients send many that concern them alone.
"""

from __future__ import annotations

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
TokenIdList = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_BIASES)]


class _Body(BaseModel):
    """Strict: `"0.5"`, `true` or `1.0` are no integers. JSON's NaN and Infinity extensions are refused."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", protected_namespaces=())


class StreamOptions(_Body):
    """`stream_options` of a streamed request."""

    include_usage: bool | None = None


class ResponseFormat(_Body):
    """`response_format`; only free text is produced."""

    type: Literal["text"]


# Known elsewhere, not here: refused unless absent, null or empty, so that nobody believes they worked.
_UNSUPPORTED = {
    "audio": "audio is not supported",
    "function_call": "function calling is not supported",
    "functions": "function calling is not supported",
    "guided_choice": "guided decoding is not supported",
    "guided_grammar": "guided decoding is not supported",
    "guided_json": "guided decoding is not supported",
    "guided_regex": "guided decoding is not supported",
    "grammar": "guided decoding is not supported",
    "json_schema": "guided decoding is not supported",
    "prediction": "predicted outputs are not supported",
    "prompt_embeds": "embeddings as prompts are not supported",
    "structured_outputs": "guided decoding is not supported",
    "suffix": "inserting text before a suffix is not supported by this server's models",
    "tools": "tool calling is not supported",
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
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_BOUND)
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_BOUND)
    response_format: ResponseFormat | None = None
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


class ChatMessage(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The form chat templates expect: text content, and the roles that they know."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content or "",
        }
        if self.name is not None:
            message["name"] = self.name
        return message


class ChatCompletionRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_BOUND)

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "only allowed together with logprobs: true")
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


class AssistantMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


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
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What a streamed event adds to the message; unset fields are left out of the event."""

    role: Literal["assistant"] | None = None
    content: str | None = None


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
    """Answer of `/livez` and `/readyz`."""

    status: str
    reason: str | None = None
