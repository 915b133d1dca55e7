"""Windows of a text, and the norms of a layer's inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from service.data import CALIBRATION_TEXT, HELDOUT_TEXT
from service.errors import CheckpointError
from service.pruning.calibration import CalibrationOptions, FeatureNorms, recorded, token_windows


def test_windows_lie_evenly_over_the_text(make_model: Callable[..., Path], text: Path) -> None:
    """1200 bytes are 1200 tokens here, 12 windows of 100; four of them are every third."""
    windows = token_windows(make_model(), text, sequences=4, sequence_tokens=100)
    everything = token_windows(make_model(name="again"), text, sequences=None, sequence_tokens=100)

    assert everything.tokens.shape == (12, 100)
    assert torch.equal(windows.tokens, everything.tokens[[0, 3, 6, 9]])


def test_a_short_text_gives_the_windows_it_has(make_model: Callable[..., Path], text: Path) -> None:
    """`sequences` is an upper bound; what is left at the end is not used."""
    assert token_windows(make_model(), text, sequences=99, sequence_tokens=500).tokens.shape == (2, 500)


def test_a_text_shorter_than_a_window_is_refused(make_model: Callable[..., Path], text: Path) -> None:
    """With both figures, so that the reader can choose."""
    with pytest.raises(ValueError, match="has 1200 tokens, one window needs 1201"):
        token_windows(make_model(), text, sequences=1, sequence_tokens=1201)


def test_a_text_that_is_not_utf8_is_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """A model pruned on mojibake would not show it."""
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9 " * 100)

    with pytest.raises(ValueError, match="not UTF-8"):
        token_windows(make_model(), file, sequences=1, sequence_tokens=10)


def test_a_text_that_is_not_there_is_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """As one message of the command line, not as a traceback."""
    with pytest.raises(ValueError, match=r"none\.txt: the text cannot be read: No such file"):
        token_windows(make_model(), tmp_path / "none.txt", sequences=1, sequence_tokens=10)


def test_a_model_without_a_tokenizer_is_refused(make_model: Callable[..., Path], text: Path) -> None:
    """Named, not looked up on the network."""
    directory = make_model()
    for file in directory.glob("tokenizer*"):
        file.unlink()

    with pytest.raises(CheckpointError, match="no tokenizer"):
        token_windows(directory, text, sequences=1, sequence_tokens=10)


def test_batches_hold_all_windows_in_order(make_model: Callable[..., Path], text: Path) -> None:
    """At least one window each, even when a window is larger than a batch."""
    windows = token_windows(make_model(), text, sequences=5, sequence_tokens=100)

    assert [len(batch) for batch in windows.batches(200)] == [2, 2, 1]
    assert [len(batch) for batch in windows.batches(10)] == [1] * 5
    assert torch.equal(torch.cat(windows.batches(200)), windows.tokens)


def test_norms_are_those_of_all_tokens_together() -> None:
    """Whatever the shapes of the batches; in float64, so that many tokens do not lose digits."""
    x = torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(2))
    norms = FeatureNorms()
    norms.update(x[:4])
    norms.update(x[4:].reshape(-1, 5))

    torch.testing.assert_close(norms.norms, x.double().reshape(-1, 5).norm(dim=0), rtol=1e-6, atol=0)


def test_hooks_record_only_inside_the_block() -> None:
    """A hook left behind would slow the model down and change the norms."""
    linear = nn.Linear(4, 2)
    with recorded({"a": linear}, FeatureNorms) as norms:
        linear(torch.ones(1, 3, 4))
    linear(torch.full((1, 3, 4), 100.0))

    assert norms["a"].norms.tolist() == pytest.approx([3**0.5] * 4)


def test_a_layer_that_saw_nothing_has_no_norms() -> None:
    """An expert that no token was routed to must not be pruned by norms of zero unnoticed."""
    with pytest.raises(ValueError, match="no calibration token"):
        _ = FeatureNorms().norms


@pytest.mark.parametrize("values", [{"sequences": 0}, {"sequence_tokens": 0}])
def test_impossible_options_are_refused(values: dict[str, int]) -> None:
    """When they are built, not when the model is loaded."""
    with pytest.raises(ValueError, match="must be at least 1"):
        CalibrationOptions(**values)


@pytest.mark.parametrize("file", [CALIBRATION_TEXT, HELDOUT_TEXT])
def test_the_shipped_texts_are_there_and_of_a_size(file: Path) -> None:
    """They are package data: a wheel without them would fail only at a user's first prune."""
    assert 50_000 < len(file.read_text("utf-8")) < 120_000


def test_the_shipped_texts_do_not_overlap() -> None:
    """Perplexity on calibration text would flatter Wanda."""
    paragraphs = [set(file.read_text("utf-8").split("\n\n")) for file in (CALIBRATION_TEXT, HELDOUT_TEXT)]

    assert {p for p in paragraphs[0] & paragraphs[1] if len(p) > 20} == set()
