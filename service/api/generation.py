"""From a validated request to the pieces of its answer: limits, admission, the sequences' outputs merged."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from service.engine.client import Arrived, RequestStream
from service.engine.grammar_client import Grammar
from service.engine.protocol import RequestOutput, SamplingParams
from service.errors import ContextLengthExceeded, InvalidRequest, LacunarError, ModelNotFound

from .choice import Choice, Piece
from .context import ServerContext
from .schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    Prompt,
    PromptTokensDetails,
    TemplateFields,
    Usage,
)
from .tools import ToolCallParser, ToolFormat, is_forced

# Shorter texts are tokenised in the event loop (well under a millisecond); longer ones in a thread, where
# the tokenizer releases the interpreter.
_INLINE_CHARACTERS = 4096
_INLINE_MESSAGES = 32

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
_SEED_RANGE = 2**63

Value = TypeVar("Value", int, float)


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt ready for the engine, and its text where that is to be echoed."""

    token_ids: list[int]
    text: str | None
    name: str


async def tokenize_completion(context: ServerContext, request: CompletionRequest) -> list[TokenizedPrompt]:
    """Encode the prompts of a completion request."""
    _check_choices(context, len(request.prompt), request.n)
    prompts = []
    for position, prompt in enumerate(request.prompt):
        name = "prompt" if len(request.prompt) == 1 else f"prompt[{position}]"
        prompts.append(await _tokenize(context, prompt, name, keep_text=bool(request.echo)))
    return prompts


def _check_choices(context: ServerContext, prompts: int, n: int | None) -> None:
    # Before anything is tokenised: a body holds up to a million short prompts, which would keep the event
    # loop from everyone else for half a minute.
    n = n or 1
    if prompts * n > context.settings.max_choices:
        raise InvalidRequest(
            f"{prompts} prompts times n={n} are {prompts * n} choices, but one request may have at most "
            f"{context.settings.max_choices}",
            param="n" if n > 1 else "prompt",
        )


async def _tokenize(context: ServerContext, prompt: Prompt, name: str, *, keep_text: bool) -> TokenizedPrompt:
    if isinstance(prompt, str):
        if len(prompt) <= _INLINE_CHARACTERS:
            token_ids = context.tokenizer.encode(prompt)
        else:
            token_ids = await asyncio.to_thread(context.tokenizer.encode, prompt)
        text = prompt
    else:
        token_ids = prompt
        vocabulary = context.engine.info.vocab_size
        if not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocabulary)
            raise InvalidRequest(
                f"{name} has token id {wrong}, but this model's token ids are 0 to {vocabulary - 1}",
                param="prompt",
            )
        text = context.tokenizer.decode(token_ids, skip_special_tokens=False) if keep_text else ""
    if not token_ids:
        raise InvalidRequest(f"{name} gives no tokens; at least one is needed", param="prompt")
    return TokenizedPrompt(token_ids, text if keep_text else None, name)


async def tokenize_chat(context: ServerContext, request: ChatCompletionRequest) -> list[TokenizedPrompt]:
    """Render the conversation with the model's template and encode it."""
    _check_choices(context, 1, request.n)
    token_ids = await render_chat(context, request)
    if not token_ids:
        raise InvalidRequest("messages give no tokens; at least one is needed", param="messages")
    return [TokenizedPrompt(token_ids, None, "messages")]


async def render_chat(context: ServerContext, request: TemplateFields) -> list[int]:
    """Token ids of a conversation by the model's template."""
    limit = context.max_sequence_tokens
    if len(request.messages) > limit:
        # Before the template runs, which takes seconds for so many.
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens, but there are {len(request.messages)} "
            "messages. Shorten the conversation.",
            param="messages",
        )
    messages = [message.for_template() for message in request.messages]
    variables = request.template_variables()
    small = (
        len(messages) <= _INLINE_MESSAGES
        and not variables["tools"]
        and not variables["variables"]
        and sum(len(message["content"]) for message in messages) <= _INLINE_CHARACTERS
    )
    if small:
        return context.tokenizer.apply_chat_template(messages, **variables)
    return await asyncio.to_thread(context.tokenizer.apply_chat_template, messages, **variables)


def check_model(context: ServerContext, name: str | None) -> None:
    """Raises ModelNotFound unless `name` is the served model's or None."""
    if name is not None and name != context.model_name:
        shown = name if len(name) <= 200 else name[:200] + "..."
        raise ModelNotFound(
            f"the model {shown!r} does not exist here; this server has {context.model_name!r}", param="model"
        )


def _max_tokens(context: ServerContext, request: GenerationRequest, prompt: TokenizedPrompt) -> int:
    """How many tokens the sequence may have, checked against the longest one that is served."""
    limit = context.max_sequence_tokens
    length = len(prompt.token_ids)
    field, asked = "max_tokens", request.max_tokens
    echo = isinstance(request, CompletionRequest) and bool(request.echo)
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        field, asked = "max_completion_tokens", request.max_completion_tokens
    if asked == 0 and not echo:
        raise InvalidRequest(f"{field} is 0, which is only allowed together with echo: true", param=field)
    room = limit - length
    if room < (0 if asked == 0 else 1):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens, but {prompt.name} has {length} tokens"
            + ("" if length > limit else ", which leaves no room for the completion")
            + ". Shorten the prompt.",
            param=prompt.name.partition("[")[0],
        )
    if asked is None:
        wanted = _COMPLETION_MAX_TOKENS if isinstance(request, CompletionRequest) else room
        return min(wanted, room)
    if asked > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens, but {prompt.name} has {length} tokens "
            f"and {field} asks for {asked}: {length + asked} in all. Shorten the prompt or lower {field}.",
            param=field,
        )
    return asked


def _check_token_fields(context: ServerContext, request: GenerationRequest) -> None:
    vocabulary = context.engine.info.vocab_size
    for field, ids in (("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids or [])):
        for token_id in ids:
            if token_id >= vocabulary:
                raise InvalidRequest(
                    f"{field} has token id {token_id}, but this model's token ids are 0 to {vocabulary - 1}",
                    param=field,
                )


def _logprob_counts(request: GenerationRequest) -> tuple[int | None, int | None]:
    """How many alternatives for output tokens and for prompt tokens; None for no log probabilities."""
    if isinstance(request, CompletionRequest):
        return request.logprobs, request.logprobs if request.echo else None
    assert isinstance(request, ChatCompletionRequest)
    return (request.top_logprobs or 0) if request.logprobs else None, None


def _check_total(context: ServerContext, request: GenerationRequest, samplings: list[SamplingParams]) -> None:
    total = sum(sampling.max_tokens for sampling in samplings) * (request.n or 1)
    limit = context.settings.max_request_tokens
    if total > limit:
        raise InvalidRequest(
            f"all choices together may have {total} tokens, but one request may ask for at most {limit}. "
            "Lower n or max_tokens.",
            param="n" if (request.n or 1) > 1 else "max_tokens",
        )


def _sampling(
    context: ServerContext,
    request: GenerationRequest,
    prompt: TokenizedPrompt,
    choice: int,
    grammar: Grammar | None,
) -> SamplingParams:
    defaults = context.defaults
    max_tokens = _max_tokens(context, request, prompt)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, but at most {max_tokens} tokens will be generated",
            param="min_tokens",
        )
    logprobs, prompt_logprobs = _logprob_counts(request)
    seed = request.seed
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=max(0, _or(request.top_k, defaults.top_k)),
        min_p=_or(request.min_p, defaults.min_p),
        # The choices of one prompt must differ, and each must be reproducible.
        seed=None if seed is None else (seed + choice) % _SEED_RANGE,
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=request.logit_bias,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        grammar=None if grammar is None else grammar.key,
    )


def _tool_parser(request: GenerationRequest, tool_format: ToolFormat | None) -> ToolCallParser | None:
    if tool_format is None:
        return None
    assert isinstance(request, ChatCompletionRequest)
    names = [tool.function.name for tool in request.tools or ()]
    return ToolCallParser(tool_format, names, forced=is_forced(request))


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


class Generation:
    """The running sequences of one request. Leaving its context aborts what still runs.

    Attributes:
        id: the answer's id.
        created: Unix time.
        system_fingerprint: the server's.
        choices: in the order of the answer: all choices of the first prompt, then of the second, ...
    """

    def __init__(
        self,
        context: ServerContext,
        endpoint: str,
        choices: Sequence[Choice],
        streams: Sequence[RequestStream | None],
        *,
        answer_id: str,
        arrived: float,
    ) -> None:
        self.id = answer_id
        self.created = int(time.time())
        self.system_fingerprint = context.system_fingerprint
        self.choices = choices
        self._context = context
        self._endpoint = endpoint
        self._streams = streams
        self._arrived = arrived
        self._last_token = [arrived] * len(choices)

    @classmethod
    def start(
        cls,
        context: ServerContext,
        request: CompletionRequest | ChatCompletionRequest,
        prompts: Sequence[TokenizedPrompt],
        *,
        arrived: float,
        grammar: Grammar | None = None,
        tool_format: ToolFormat | None = None,
    ) -> Generation:
        """Check everything, then take the request into the engine.

        Args:
            arrived: `time.monotonic()` when the request came in.
            grammar: what the output must match.
            tool_format: how tool calls in the output are written, where they are looked for.

        Raises:
            InvalidRequest, ContextLengthExceeded: a limit is exceeded; nothing was started.
            QueueFull, EngineUnavailable: the engine cannot take it now; nothing was started.
        """
        chat = isinstance(request, ChatCompletionRequest)
        n = request.n or 1
        _check_token_fields(context, request)
        echo = isinstance(request, CompletionRequest) and bool(request.echo)
        samplings = [
            [_sampling(context, request, prompt, k, grammar) for k in range(n)] for prompt in prompts
        ]
        _check_total(context, request, [of_prompt[0] for of_prompt in samplings])
        skip_special = request.skip_special_tokens is not False
        if tool_format is not None and context.tokenizer.is_special(tool_format.begin):
            skip_special = False
        answer_id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        choices: list[Choice] = []
        streams: list[RequestStream | None] = []
        try:
            with context.engine.admit(len(prompts) * n) as admission:
                for prompt, of_prompt in zip(prompts, samplings, strict=True):
                    for sampling in of_prompt:
                        choices.append(
                            Choice(
                                context.tokenizer,
                                index=len(choices),
                                prompt_token_ids=prompt.token_ids,
                                stops=request.stop,
                                include_stop=bool(request.include_stop_str_in_output),
                                min_tokens=sampling.min_tokens,
                                want_logprobs=sampling.logprobs is not None,
                                # Scoring clients (lm-eval) take one generated token off the list's end.
                                stop_token_logprobs=not chat,
                                echo=prompt.text if echo else None,
                                skip_special_tokens=skip_special,
                                after_prompt=not chat and context.tokenizer.spaces_depend_on_context,
                                tool_parser=_tool_parser(request, tool_format),
                            )
                        )
                        # With nothing to compute there is nothing to ask the engine for.
                        if sampling.max_tokens == 0 and sampling.prompt_logprobs is None:
                            streams.append(None)
                            continue
                        request_id = f"{answer_id}-{len(streams)}"
                        streams.append(
                            context.engine.generate(request_id, prompt.token_ids, sampling, admission)
                        )
        except BaseException:
            for stream in streams:
                if stream is not None:
                    stream.close()
            raise
        endpoint = "chat.completions" if chat else "completions"
        context.metrics.requests.labels(endpoint).inc()
        context.metrics.admission.observe(time.monotonic() - arrived)
        context.metrics.request_prompt_tokens.inc(sum(len(prompt.token_ids) for prompt in prompts))
        return cls(context, endpoint, choices, streams, answer_id=answer_id, arrived=arrived)

    async def __aenter__(self) -> Generation:
        self._context.metrics.requests_open.inc()
        return self

    async def __aexit__(self, *_: object) -> None:
        metrics = self._context.metrics
        for choice, stream in zip(self.choices, self._streams, strict=True):
            if stream is not None:
                stream.close()
            metrics.sequences_finished.labels(choice.finish_reason or "abort").inc()
        metrics.requests_open.dec()
        metrics.request_duration.labels(self._endpoint).observe(time.monotonic() - self._arrived)

    @property
    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many choices it has."""
        prompts = {id(choice.prompt_token_ids): choice for choice in self.choices}.values()
        prompt_tokens = sum(len(choice.prompt_token_ids) for choice in prompts)
        completion_tokens = sum(choice.completion_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(choice.cached_tokens for choice in prompts)
            ),
        )

    async def pieces(self) -> AsyncGenerator[Shown, None]:
        """What the choices produce, as it comes; ends when all have a finish reason.

        Raises:
            SequenceFailed, EngineUnavailable: one of the sequences cannot be finished.
        """
        for choice, stream in zip(self.choices, self._streams, strict=True):
            if stream is None:
                yield Shown(choice, choice.echo_only(), None)
        async with aclosing(_merge(self._streams)) as batches:
            async for position, batch in batches:
                choice = self.choices[position]
                self._observe(position, batch)
                for output in _joined(batch):
                    piece = choice.feed(output)
                    if not piece.empty:
                        yield Shown(choice, piece, batch[0].sent_seconds)
                    if choice.stopped_by_string:
                        break
                if choice.stopped_by_string:
                    stream = self._streams[position]
                    assert stream is not None
                    stream.close()

    def _observe(self, position: int, batch: Sequence[Arrived]) -> None:
        metrics = self._context.metrics
        fresh = self.choices[position].completion_tokens == 0
        for output, sent_seconds in batch:
            if output.queue_seconds is not None:
                metrics.queue.observe(output.queue_seconds)
            if output.prefill_seconds is not None:
                metrics.prefill.observe(output.prefill_seconds)
            if output.token_ids:
                elapsed, self._last_token[position] = sent_seconds - self._last_token[position], sent_seconds
                (metrics.time_to_first_token if fresh else metrics.inter_token).observe(max(0.0, elapsed))
                fresh = False


class Shown(NamedTuple):
    """A piece of a choice, and when the engine sent the oldest token in it; None without tokens."""

    choice: Choice
    piece: Piece
    sent_seconds: float | None


def _joined(batch: Sequence[Arrived]) -> list[RequestOutput]:
    """The outputs of a batch as one, so that what came together is decoded and written together."""
    joined: list[RequestOutput] = []
    for output, _ in batch:
        if not joined or output.finish_reason in ("error", "abort"):
            joined.append(output)
            continue
        before = joined.pop()
        joined.append(
            msgspec.structs.replace(
                output,
                token_ids=before.token_ids + output.token_ids,
                logprobs=(before.logprobs or []) + (output.logprobs or []) or None,
                prompt_logprobs=before.prompt_logprobs,
                cached_tokens=max(before.cached_tokens, output.cached_tokens),
            )
        )
    return joined


async def _merge(
    streams: Sequence[RequestStream | None],
) -> AsyncGenerator[tuple[int, list[Arrived]], None]:
    """Outputs of several sequences as they arrive, each with its sequence's position."""
    running = [(position, stream) for position, stream in enumerate(streams) if stream is not None]
    if len(running) == 1:
        position, stream = running[0]
        while batch := await stream.batch():
            yield position, batch
        return
    queue: asyncio.Queue[tuple[int, list[Arrived] | LacunarError]] = asyncio.Queue()

    async def pump(position: int, stream: RequestStream) -> None:
        try:
            while batch := await stream.batch():
                queue.put_nowait((position, batch))
            queue.put_nowait((position, []))
        except LacunarError as error:
            queue.put_nowait((position, error))

    pumps = [asyncio.create_task(pump(position, stream)) for position, stream in running]
    open_pumps = len(pumps)
    try:
        while open_pumps:
            position, item = await queue.get()
            if isinstance(item, LacunarError):
                raise item
            if item:
                yield position, item
            else:
                open_pumps -= 1
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
