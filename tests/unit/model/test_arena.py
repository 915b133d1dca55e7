"""The memory that a model's weights lie in on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from service.model import arena
from service.model.arena import HUGE_PAGE_BYTES, WeightArena
from service.model.loader import load_model
from tests.unit.model.checkpoint_files import small_llama

SMAPS = Path("/proc/self/smaps")
linux_only = pytest.mark.skipif(
    not SMAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="needs Linux with transparent huge pages",
)


def mappings() -> Iterator[tuple[range, list[str]]]:
    """Addresses and kernel flags of this process's mappings."""
    addresses = range(0)
    for line in SMAPS.read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:":
            yield addresses, rest
        elif not first.endswith(":"):
            begin, end = first.split("-")
            addresses = range(int(begin, 16), int(end, 16))


def flags_at(address: int) -> list[str]:
    return next((flags for addresses, flags in mappings() if address in addresses), [])


def test_tensors_follow_one_another_and_keep_what_is_written() -> None:
    """A gap would be read for nothing; an overlap would be a wrong weight."""
    room = WeightArena()
    shapes = [((3, 5), torch.bfloat16), ((100,), torch.int64), ((7,), torch.uint8), ((64, 33), torch.float32)]
    tensors = [room.empty(shape, dtype) for shape, dtype in shapes]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value + 1)

    end = tensors[0].data_ptr()
    assert end % HUGE_PAGE_BYTES == 0
    for value, (tensor, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() == end
        assert end % 64 == 0
        end += -(-tensor.numel() * tensor.element_size() // 64) * 64
        assert bool((tensor == value + 1).all())


def test_a_mapping_that_is_full_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that do not fit the rest of a mapping, or any mapping, lie whole elsewhere."""
    monkeypatch.setattr(arena, "_MAPPING_BYTES", 4096)
    room = WeightArena()
    tensors = [room.empty((n,), torch.uint8) for n in (4000, 100, 10_000, 3000, 4096)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value + 1)
    for value, tensor in enumerate(tensors):
        assert bool((tensor == value + 1).all())
    assert tensors[3].data_ptr() == tensors[1].data_ptr() + 128  # the large one took no room from the rest


def test_a_tensor_without_elements_needs_no_mapping() -> None:
    room = WeightArena()
    assert room.empty((0, 8), torch.bfloat16).shape == (0, 8)
    assert room._free.numel() == 0


@linux_only
def test_huge_pages_are_asked_for_and_given_back_with_the_last_tensor() -> None:
    room = WeightArena()
    first, second = room.empty((1000,), torch.uint8), room.empty((1000,), torch.uint8)
    address = first.data_ptr()
    assert "hg" in flags_at(address)
    del room, first
    assert "hg" in flags_at(address)
    del second
    assert "hg" not in flags_at(address)


@linux_only
@pytest.mark.parametrize("weights", ["auto", "dense"])
def test_every_linear_weight_of_a_model_lies_there(tmp_path: Path, weights: str) -> None:
    """One that is allocated past the arena would be slow and nothing else would show it."""
    small_llama(tmp_path)
    model = load_model(tmp_path, weights=weights)
    huge = [addresses for addresses, flags in mappings() if "hg" in flags]
    tensors = []
    for linear in model._linears():
        weight = linear.weight
        is_dense = isinstance(weight, torch.Tensor)
        tensors += [weight] if is_dense else [weight.bitmap, weight.values, weight.row_offsets]
    assert tensors
    for tensor in tensors:
        assert any(tensor.data_ptr() in addresses for addresses in huge)
