"""One choice of an answer: from the engine's token ids to text, log probabilities and a finish reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from service.engine.protocol import FinishReason, RequestOutput, TokenLogprobs
from service.errors import EngineUnavailable, LacunarError
from service.tokenization import IncrementalDetokenizer, Tokenizer

from .schemas import ToolCall
from .stop_strings import StopStringMatcher
from .tools import ToolCallParser

# Tokens of the prompt that are decoded with the output, so that its first space is kept.
_CONTEXT_TOKENS = 6


class SequenceFailed(LacunarError):
    """The engine could not go on with one sequence, for a reason that lies in the sequence."""


@dataclass(frozen=True)
class LogprobEntry:
    """A token of the choice's text. `offset` counts characters from the text's start; `logprob` is None
    for a prompt's first token."""

    token_id: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    offset: int


@dataclass
class Piece:
    """What can be shown next. `first` marks the choice's first piece that is not empty."""

    text: str = ""
    logprobs: list[LogprobEntry] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    first: bool = False

    @property
    def empty(self) -> bool:
        """Nothing in it for a client."""
        return not (self.text or self.logprobs or self.tool_calls or self.finish_reason)


class Choice:
    """Assembles one sequence's outputs; no I/O.

    Args:
        index: its number in the answer.
        prompt_token_ids: the prompt.
        stops, include_stop: stop strings, and whether a matched one stays in the text.
        min_tokens: stop strings are not looked for before this many tokens.
        want_logprobs: whether the engine sends log probabilities.
        stop_token_logprobs: whether those of the token that ended the sequence are shown; it has no text.
        echo: the prompt's text to begin with, or None.
        skip_special_tokens: leave special tokens out of the text.
        after_prompt: the text goes on where the prompt's ends.
        tool_parser: finds tool calls in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        index: int,
        prompt_token_ids: Sequence[int],
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        want_logprobs: bool = False,
        stop_token_logprobs: bool = False,
        echo: str | None = None,
        skip_special_tokens: bool = True,
        after_prompt: bool = False,
        tool_parser: ToolCallParser | None = None,
    ) -> None:
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        after = prompt_token_ids[-_CONTEXT_TOKENS:] if after_prompt else ()
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, after=after
        )
        self.tool_parser = tool_parser
        self._matcher = StopStringMatcher(stops, include_match=include_stop)
        self._min_tokens = min_tokens
        self._want_logprobs = want_logprobs
        self._stop_token_logprobs = stop_token_logprobs
        self._by_token = bool(stops) or want_logprobs
        self._echo = echo
        self._started = False
        self._announced = False
        # Characters decoded so far (where the next token's text begins), and characters shown so far.
        self._decoded = 0
        self._shown = 0
        self._entries: list[LogprobEntry] = []

    @property
    def stopped_by_string(self) -> bool:
        """A stop string was met, which the engine does not know of."""
        return self._matcher.matched is not None

    def feed(self, output: RequestOutput) -> Piece:
        """Take one step's output.

        Raises:
            SequenceFailed: the engine gave the sequence up; the message is for the client.
            EngineUnavailable: the engine aborted it.
        """
        if output.finish_reason == "error":
            self.finish_reason = "error"
            raise SequenceFailed(output.error or "the sequence could not be completed")
        if output.finish_reason == "abort":
            self.finish_reason = "abort"
            raise EngineUnavailable("the engine aborted the sequence")
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        text = "" if self._started else self._begin(output.prompt_logprobs)
        tokens = output.token_ids
        shown = len(tokens) - (1 if output.stop_token_id is not None else 0)
        if not self._by_token:
            self.completion_tokens += len(tokens)
            text += self._detokenizer.push(tokens[:shown])
        else:
            for position, token_id in enumerate(tokens):
                self.completion_tokens += 1
                logprobs = output.logprobs[position] if output.logprobs else None
                if position < shown:
                    text += self._push(token_id, logprobs)
                elif self._stop_token_logprobs:
                    self._add_entry(token_id, logprobs)
                if self.stopped_by_string:
                    break
        finish = "stop" if self.stopped_by_string else output.finish_reason
        if finish is not None:
            if not self.stopped_by_string:
                rest = self._detokenizer.flush()
                text += self._matcher.feed(rest) + self._matcher.flush()
            if self.stopped_by_string:
                finish = "stop"
            self.finish_reason = finish
        return self._piece(text)

    def echo_only(self) -> Piece:
        """The whole choice when no token is wanted: the prompt's text."""
        text = self._begin(None)
        self.finish_reason = "length"
        return self._piece(text)

    def _begin(self, prompt_logprobs: Sequence[TokenLogprobs | None] | None) -> str:
        if self._echo is None:
            return ""
        if prompt_logprobs is not None:
            detokenizer = IncrementalDetokenizer(self._tokenizer)
            offset = 0
            for token_id, logprobs in zip(self.prompt_token_ids, prompt_logprobs, strict=True):
                logprob, top = (None, []) if logprobs is None else (logprobs.logprob, logprobs.top)
                self._entries.append(LogprobEntry(token_id, logprob, top, min(offset, len(self._echo))))
                if not self._tokenizer.is_special(token_id):
                    offset += len(detokenizer.push([token_id]))
                elif self._echo.startswith(written := self._tokenizer.token_text(token_id), offset):
                    # Others the tokenizer added by itself; they take no place in the text.
                    offset += len(written)
        self._decoded = len(self._echo)
        return self._echo

    def _push(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
        self._add_entry(token_id, logprobs)
        text = self._detokenizer.push([token_id])
        self._decoded += len(text)
        return text if self.completion_tokens <= self._min_tokens else self._matcher.feed(text)

    def _add_entry(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if logprobs is not None:
            self._entries.append(LogprobEntry(token_id, logprobs.logprob, logprobs.top, self._decoded))

    def _piece(self, text: str) -> Piece:
        self._started = True
        self._shown += len(text)
        if self.finish_reason is None or self.stopped_by_string:
            ready = [entry for entry in self._entries if entry.offset < self._shown]
        else:
            ready = self._entries
        self._entries = [] if self.finish_reason is not None else self._entries[len(ready) :]
        piece = Piece(text=text, logprobs=ready, finish_reason=self.finish_reason)
        if self.tool_parser is not None:
            piece.text, piece.tool_calls = self.tool_parser.feed(text)
            if self.finish_reason is not None:
                rest, calls = self.tool_parser.flush()
                piece.text += rest
                piece.tool_calls += calls
        if not piece.empty:
            piece.first, self._announced = not self._announced, True
        return piece
