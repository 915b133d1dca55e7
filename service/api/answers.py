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
    def whole(self, texts: Sequence[str], logprobs: Sequence[list[LogprobEntry]]) -> BaseModel:
        """The answer to a request without `stream`."""

    @abstractmethod
    def chunk(self, choice: Choice, piece: Piece) -> BaseModel:
        """One event of a stream. Fields that are not set are left out of it."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> BaseModel:
        """The last event, where the client asked for the usage."""


class CompletionFormat(AnswerFormat):
    """Writes for /v1/completions."""

    def whole(self, texts: Sequence[str], logprobs: Sequence[list[LogprobEntry]]) -> Completion:
        """See AnswerFormat."""
        choices = [
            CompletionChoice(
                index=choice.index,
                text=text,
                logprobs=self._logprobs(entries),
                finish_reason=choice.finish_reason,
            )
            for choice, text, entries in zip(self.generation.choices, texts, logprobs, strict=True)
        ]
        return self._answer(choices, self.generation.usage)

    def chunk(self, choice: Choice, piece: Piece) -> Completion:
        """See AnswerFormat."""
        content = CompletionChoice(
            index=choice.index,
            text=piece.text,
            logprobs=self._logprobs(piece.logprobs),
            finish_reason=piece.finish_reason,
        )
        return self._answer([content], None)

    def usage_chunk(self, usage: Usage) -> Completion:
        """See AnswerFormat."""
        return self._answer([], usage)

    def _answer(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(
            id=self.generation.id,
            object="text_completion",
            created=self.generation.created,
            model=self.model,
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

    def whole(self, texts: Sequence[str], logprobs: Sequence[list[LogprobEntry]]) -> ChatCompletion:
        """See AnswerFormat."""
        return ChatCompletion(
            id=self.generation.id,
            created=self.generation.created,
            model=self.model,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=AssistantMessage(content=text),
                    logprobs=self._logprobs(entries),
                    finish_reason=choice.finish_reason,
                )
                for choice, text, entries in zip(self.generation.choices, texts, logprobs, strict=True)
            ],
            usage=self.generation.usage,
        )

    def chunk(self, choice: Choice, piece: Piece) -> ChatCompletionChunk:
        """See AnswerFormat. The first event of a choice names the role."""
        delta = ChatDelta()
        if piece.first:
            delta = ChatDelta(role="assistant", content=piece.text)
        elif piece.text:
            delta = ChatDelta(content=piece.text)
        content = ChatChunkChoice(
            index=choice.index,
            delta=delta,
            logprobs=self._logprobs(piece.logprobs),
            finish_reason=piece.finish_reason,
        )
        return self._event([content], None)

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        """See AnswerFormat."""
        return self._event([], usage)

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.generation.id,
            object="chat.completion.chunk",
            created=self.generation.created,
            model=self.model,
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


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NO_CHANCE
