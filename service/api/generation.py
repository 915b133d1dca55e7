"""From a validated request to the pieces of its answer: limits, admission, the sequences' outputs merged."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from service.engine.client import RequestStream
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
    Usage,
)

# Shorter texts are tokenised in the event loop (well under a millisecond); longer ones in a thread, where
# the tokenizer releases the interpreter.
_INLINE_CHARACTERS = 4096

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
        text = context.tokenizer.decode(token_ids) if keep_text else ""
    if not token_ids:
        raise InvalidRequest(f"{name} gives no tokens; at least one is needed", param="prompt")
    return TokenizedPrompt(token_ids, text if keep_text else None, name)


async def tokenize_chat(context: ServerContext, request: ChatCompletionRequest) -> list[TokenizedPrompt]:
    """Render the conversation with the model's template and encode it."""
    _check_choices(context, 1, request.n)
    messages = [message.for_template() for message in request.messages]
    if sum(len(message["content"]) for message in messages) <= _INLINE_CHARACTERS:
        token_ids = context.tokenizer.apply_chat_template(messages)
    else:
        token_ids = await asyncio.to_thread(context.tokenizer.apply_chat_template, messages)
    if not token_ids:
        raise InvalidRequest("messages give no tokens; at least one is needed", param="messages")
    return [TokenizedPrompt(token_ids, None, "messages")]


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


def _sampling(
    context: ServerContext, request: GenerationRequest, prompt: TokenizedPrompt, choice: int
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
    )


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


class Generation:
    """The running sequences of one request. Leaving its context aborts what still runs.

    Attributes:
        id: the answer's id.
        created: Unix time.
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
    ) -> Generation:
        """Check everything, then take the request into the engine.

        Args:
            arrived: `time.monotonic()` when the request came in.

        Raises:
            InvalidRequest, ContextLengthExceeded: a limit is exceeded; nothing was started.
            QueueFull, EngineUnavailable: the engine cannot take it now; nothing was started.
        """
        chat = isinstance(request, ChatCompletionRequest)
        n = request.n or 1
        _check_token_fields(context, request)
        echo = isinstance(request, CompletionRequest) and bool(request.echo)
        samplings = [[_sampling(context, request, prompt, k) for k in range(n)] for prompt in prompts]
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
                                echo=prompt.text if echo else None,
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

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """What the choices produce, as it comes; ends when all have a finish reason.

        Raises:
            SequenceFailed, EngineUnavailable: one of the sequences cannot be finished.
        """
        for choice, stream in zip(self.choices, self._streams, strict=True):
            if stream is None:
                yield choice, choice.echo_only()
        async with aclosing(_merge(self._streams)) as outputs:
            async for position, output in outputs:
                choice = self.choices[position]
                self._observe(position, output)
                piece = choice.feed(output)
                if choice.stopped_by_string:
                    stream = self._streams[position]
                    assert stream is not None
                    stream.close()
                if not piece.empty:
                    yield choice, piece

    def _observe(self, position: int, output: RequestOutput) -> None:
        metrics = self._context.metrics
        if output.queue_seconds is not None:
            metrics.queue.observe(output.queue_seconds)
        if output.prefill_seconds is not None:
            metrics.prefill.observe(output.prefill_seconds)
        if output.token_ids:
            now = time.monotonic()
            elapsed, self._last_token[position] = now - self._last_token[position], now
            first = self.choices[position].completion_tokens == 0
            (metrics.time_to_first_token if first else metrics.inter_token).observe(elapsed)


async def _merge(streams: Sequence[RequestStream | None]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several sequences as they arrive, each with its sequence's position."""
    running = [(position, stream) for position, stream in enumerate(streams) if stream is not None]
    if len(running) == 1:
        position, stream = running[0]
        async for output in stream:
            yield position, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | LacunarError | None]] = asyncio.Queue()

    async def pump(position: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                queue.put_nowait((position, output))
            queue.put_nowait((position, None))
        except LacunarError as error:
            queue.put_nowait((position, error))

    pumps = [asyncio.create_task(pump(position, stream)) for position, stream in running]
    open_pumps = len(pumps)
    try:
        while open_pumps:
            position, item = await queue.get()
            if item is None:
                open_pumps -= 1
            elif isinstance(item, LacunarError):
                raise item
            else:
                yield position, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
