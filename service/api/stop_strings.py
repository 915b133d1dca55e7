"""Finds stop strings in text that arrives in pieces, without letting any part of one out."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Passes text through until a stop string is complete.

    What may still turn into a stop string is held back, so the text let out never contains the beginning
    of one that later completes. The string whose last character comes first wins; of those that end
    together, the longest. The result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_match: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_match = include_match
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take the next piece; returns the text that is safe to show. After a match nothing comes out."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            start, stop = match
            self.matched = stop
            self._held = ""
            return buffer[: start + len(stop)] if self._include_match else buffer[:start]
        keep = self._longest_open_suffix(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The sequence ended otherwise: let out what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else (best[1], best[2])

    def _longest_open_suffix(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins, but does not complete, a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
