"""Calibration: token windows of a text, and the norms of a layer's input features over them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from service.data import CALIBRATION_TEXT
from service.errors import CheckpointError

from .sparsegpt import InverseFactor, inverse_factor


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """What Wanda and SparseGPT look at.

    Attributes:
        text: a UTF-8 file; the shipped excerpt when not given.
        sequences: upper bound on windows, spread evenly over the text.
        sequence_tokens: tokens per window.
    """

    text: Path = CALIBRATION_TEXT
    sequences: int = 24
    sequence_tokens: int = 512

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.sequence_tokens < 1:
            raise ValueError(
                f"sequences is {self.sequences} and sequence_tokens {self.sequence_tokens}, "
                "both must be at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class TokenWindows:
    """Windows of one text, ``[sequences, tokens]`` int64, and what identifies the text."""

    tokens: Tensor
    text: str
    text_sha256: str

    def batches(self, batch_tokens: int) -> list[Tensor]:
        """Split into batches of about `batch_tokens` tokens, at least one window each."""
        return list(torch.split(self.tokens, max(1, batch_tokens // self.tokens.shape[1])))


def token_windows(model: Path, text: Path, *, sequences: int | None, sequence_tokens: int) -> TokenWindows:
    """Tokenise a text as one document and cut it into windows that do not overlap.

    Args:
        model: a directory with a tokenizer.
        text: a UTF-8 file.
        sequences: upper bound on windows, chosen evenly over the text; None takes all.
        sequence_tokens: tokens per window; what is left at the end is not used.

    Raises:
        CheckpointError: the directory has no usable tokenizer.
        ValueError: the text cannot be read, is not UTF-8 or is shorter than one window.
    """
    from transformers import AutoTokenizer

    try:
        data = text.read_bytes()
        document = data.decode("utf-8")
    except OSError as error:
        raise ValueError(f"{text}: the text cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{text}: is not UTF-8 text: {error}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{model}: has no tokenizer that transformers can load: {error}") from error
    # verbose=False: the document is meant to be longer than the model's context.
    ids = tokenizer(document, verbose=False).input_ids
    available = len(ids) // sequence_tokens
    if available == 0:
        raise ValueError(
            f"{text}: has {len(ids)} tokens, one window needs {sequence_tokens}; "
            "give a longer text or a shorter window"
        )
    count = available if sequences is None else min(available, sequences)
    windows = torch.tensor(ids[: available * sequence_tokens]).reshape(available, sequence_tokens)
    chosen = torch.arange(count) * available // count
    return TokenWindows(
        tokens=windows[chosen].contiguous(), text=text.name, text_sha256=hashlib.sha256(data).hexdigest()
    )


class FeatureNorms:
    """Accumulates ``||x[:, k]||_2`` of a linear layer's input, ``[K]`` float64."""

    def __init__(self) -> None:
        self._squares: Tensor | None = None

    def update(self, x: Tensor) -> None:
        """Add the tokens of ``x``, ``[..., K]``."""
        squares = x.detach().float().reshape(-1, x.shape[-1]).square().sum(dim=0).double()
        self._squares = squares if self._squares is None else self._squares + squares

    @property
    def seen(self) -> bool:
        """Whether any token was seen: an expert may have none routed to it."""
        return self._squares is not None

    @property
    def norms(self) -> Tensor:
        """The norms so far; ValueError when no token was seen."""
        if self._squares is None:
            raise ValueError("no calibration token reached this layer")
        return self._squares.sqrt()


class GramMatrix:
    """Accumulates ``x.T @ x`` of a linear layer's input, ``[K, K]`` float32; for SparseGPT."""

    def __init__(self) -> None:
        self._gram: Tensor | None = None
        self._factor: InverseFactor | None = None

    def update(self, x: Tensor) -> None:
        """Add the tokens of ``x``, ``[..., K]``."""
        rows = x.detach().float().reshape(-1, x.shape[-1])
        if self._gram is None:
            self._gram = rows.new_zeros(rows.shape[1], rows.shape[1])
        self._gram.addmm_(rows.T, rows)

    @property
    def seen(self) -> bool:
        """Whether any token was seen: an expert may have none routed to it."""
        return self._gram is not None or self._factor is not None

    @property
    def factor(self) -> InverseFactor:
        """What SparseGPT needs, computed at the first call, after which no token can be added.

        Raises:
            ValueError: no token was seen, or the matrix cannot be factored.
        """
        if self._factor is None:
            if self._gram is None:
                raise ValueError("no calibration token reached this layer")
            # A copy: a tensor that was made in inference mode cannot be changed outside of it.
            gram, self._gram = self._gram.clone(), None
            self._factor = inverse_factor(gram)
        return self._factor


Statistics = TypeVar("Statistics", FeatureNorms, GramMatrix)


@contextmanager
def recorded(
    linears: Mapping[str, nn.Module], make: Callable[[], Statistics]
) -> Iterator[dict[str, Statistics]]:
    """Collect statistics of these modules' inputs for as long as the block runs.

    Modules that are handed one and the same tensor after each other (q, k and v, gate and up) share one.
    """
    found: dict[str, Statistics] = {}
    last: list[Any] = [None, None]

    def hook(name: str) -> Any:
        def record(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if args[0] is last[0] and found.get(name, last[1]) is last[1]:
                found[name] = last[1]
                return
            statistics = found.setdefault(name, make())
            statistics.update(args[0])
            last[:] = args[0], statistics

        return record

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in linears.items()]
    try:
        yield found
    finally:
        last[:] = None, None
        for handle in handles:
            handle.remove()
        for name in linears:
            found.setdefault(name, make())
