"""Puts pieces of choices into OpenAI's answers: whole ones and streamed ones, for both endpoints."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from pydantic import BaseModel

from service.tokenization import Tokenizer

from .choice import Choice, LogprobEntry, Piece
from .generation import Generation
from .schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ToolCallDelta,
    TopLogprob,
    Usage,
)

# JSON has no -inf. A token with no chance at all gets this, as OpenAI's API does.
_NO_CHANCE = -9999.0


class AnswerFormat(ABC):
    """How one endpoint writes its answer.

    Args:
        want_logprobs: whether the request asked for log probabilities; they are null otherwise.
    """

    def __init__(
        self, generation: Generation, model: str, tokenizer: Tokenizer, *, want_logprobs: bool
    ) -> None:
        self.generation = generation
        self.model = model
        self.tokenizer = tokenizer
        self.want_logprobs = want_logprobs

    @abstractmethod
    def whole(self, parts: Sequence[Piece]) -> BaseModel:
        """The answer to a request without `stream`; `parts` has all of each choice."""

    @abstractmethod
    def chunks(self, choice: Choice, piece: Piece, usage: Usage | None) -> Sequence[BaseModel]:
        """The events of a stream for one piece. Fields that are not set are left out of them."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> BaseModel:
        """The last event, where the client asked for the usage."""


class CompletionFormat(AnswerFormat):
    """Writes for /v1/completions."""

    def whole(self, parts: Sequence[Piece]) -> Completion:
        """See AnswerFormat."""
        choices = [
            CompletionChoice(
                index=choice.index,
                text=part.text,
                logprobs=self._logprobs(part.logprobs),
                finish_reason=choice.finish_reason,
            )
            for choice, part in zip(self.generation.choices, parts, strict=True)
        ]
        return self._answer(choices, self.generation.usage)

    def chunks(self, choice: Choice, piece: Piece, usage: Usage | None) -> Sequence[Completion]:
        """See AnswerFormat."""
        content = CompletionChoice(
            index=choice.index,
            text=piece.text,
            logprobs=self._logprobs(piece.logprobs),
            finish_reason=piece.finish_reason,
        )
        return [self._answer([content], usage)]

    def usage_chunk(self, usage: Usage) -> Completion:
        """See AnswerFormat."""
        return self._answer([], usage)

    def _answer(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(
            id=self.generation.id,
            object="text_completion",
            created=self.generation.created,
            model=self.model,
            system_fingerprint=self.generation.system_fingerprint,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> CompletionLogprobs | None:
        if not self.want_logprobs:
            return None
        tops: list[dict[str, float] | None] = []
        for entry in entries:
            if entry.logprob is None:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                # Two tokens may have the same text; the likelier one comes first.
                top.setdefault(self.tokenizer.token_text(token_id), _finite(logprob))
            tops.append(top)
        return CompletionLogprobs(
            tokens=[self.tokenizer.token_text(entry.token_id) for entry in entries],
            token_logprobs=[None if entry.logprob is None else _finite(entry.logprob) for entry in entries],
            top_logprobs=tops,
            text_offset=[entry.offset for entry in entries],
        )


class ChatFormat(AnswerFormat):
    """Writes for /v1/chat/completions."""

    def __init__(
        self,
        generation: Generation,
        model: str,
        tokenizer: Tokenizer,
        *,
        want_logprobs: bool,
        named_tool: bool = False,
    ) -> None:
        super().__init__(generation, model, tokenizer, want_logprobs=want_logprobs)
        # OpenAI says "stop" where the client named the function.
        self._calls_reason = "stop" if named_tool else "tool_calls"

    def whole(self, parts: Sequence[Piece]) -> ChatCompletion:
        """See AnswerFormat."""
        return ChatCompletion(
            id=self.generation.id,
            created=self.generation.created,
            model=self.model,
            system_fingerprint=self.generation.system_fingerprint,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=_message(part),
                    logprobs=self._logprobs(part.logprobs),
                    finish_reason=self._finish_reason(choice),
                )
                for choice, part in zip(self.generation.choices, parts, strict=True)
            ],
            usage=self.generation.usage,
        )

    def chunks(self, choice: Choice, piece: Piece, usage: Usage | None) -> Sequence[ChatCompletionChunk]:
        """See AnswerFormat. The first event of a choice names the role and has no text yet."""
        chunks = []
        if piece.first:
            nothing = None
            if usage is not None:
                nothing = usage.model_copy(
                    update={"completion_tokens": 0, "total_tokens": usage.prompt_tokens}
                )
            role = ChatDelta(role="assistant", content="")
            chunks.append(self._chunk(choice, role, [], None, nothing))
        delta = ChatDelta()
        if piece.text:
            delta.content = piece.text
        if piece.tool_calls:
            assert choice.tool_parser is not None
            begin = len(choice.tool_parser.calls) - len(piece.tool_calls)
            delta.tool_calls = [
                ToolCallDelta(**call.model_dump(), index=begin + offset)
                for offset, call in enumerate(piece.tool_calls)
            ]
        finish_reason = None if piece.finish_reason is None else self._finish_reason(choice)
        chunks.append(self._chunk(choice, delta, piece.logprobs, finish_reason, usage))
        return chunks

    def _chunk(
        self,
        choice: Choice,
        delta: ChatDelta,
        entries: Sequence[LogprobEntry],
        finish_reason: str | None,
        usage: Usage | None,
    ) -> ChatCompletionChunk:
        content = ChatChunkChoice(
            index=choice.index,
            delta=delta,
            logprobs=self._logprobs(entries),
            finish_reason=finish_reason,
        )
        return self._event([content], usage)

    def _finish_reason(self, choice: Choice) -> str | None:
        called = choice.tool_parser is not None and choice.tool_parser.calls
        return self._calls_reason if called and choice.finish_reason == "stop" else choice.finish_reason

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        """See AnswerFormat."""
        return self._event([], usage)

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.generation.id,
            object="chat.completion.chunk",
            created=self.generation.created,
            model=self.model,
            system_fingerprint=self.generation.system_fingerprint,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> ChatLogprobs | None:
        if not self.want_logprobs:
            return None
        return ChatLogprobs(
            content=[
                ChatTokenLogprob(
                    **self._token(entry.token_id, entry.logprob or 0.0).model_dump(),
                    top_logprobs=[self._token(token_id, logprob) for token_id, logprob in entry.top],
                )
                for entry in entries
            ]
        )

    def _token(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=self.tokenizer.token_text(token_id),
            logprob=_finite(logprob),
            bytes=list(self.tokenizer.token_bytes(token_id)),
        )


def _message(part: Piece) -> AssistantMessage:
    if not part.tool_calls:
        return AssistantMessage(content=part.text, tool_calls=None)
    return AssistantMessage(content=part.text if part.text.strip() else None, tool_calls=part.tool_calls)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NO_CHANCE
