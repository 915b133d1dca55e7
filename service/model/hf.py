"""transformers' side: packed directories load with ``AutoModelForCausalLM.from_pretrained``, and save packed.

`import service.model` registers this quantizer. The model it gives is transformers' own, with dense weights
in memory: for evaluation, fine-tuning and conversion. Serving is `load_model`'s work.

transformers only warns when a tensor is missing and goes on with random values. Here every parameter is read
by service.model.checkpoint, which refuses what is missing, unexpected or damaged.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from service.errors import CheckpointError

QUANT_METHOD = "lacunar"
# Matrices of numbered blocks are the decoder's; embeddings and the head have no number in their names.
_IN_A_BLOCK = re.compile(r"\.\d+\..*\.weight$")


@register_quantization_config(QUANT_METHOD)
class LacunarConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a packed directory (kernels_ext/formats/BITMAP.md)."""

    def __init__(self, format_version: int = 1, format: str = "bitmask", **_: Any) -> None:
        """Keep what the format page fixes; the reader checks it."""
        self.quant_method = QUANT_METHOD
        self.format_version = format_version
        self.format = format


@register_quantizer(QUANT_METHOD)
class LacunarQuantizer(HfQuantizer):  # type: ignore[misc]
    """Fills a model from a packed directory, strictly, and packs its pruned matrices when it is saved."""

    requires_calibration = True

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        """``quantization_config`` is the directory's."""
        super().__init__(quantization_config, **kwargs)
        self._directory: Path | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        from .checkpoint import Checkpoint

        if not checkpoint_files:
            raise CheckpointError("a packed model is loaded from its directory, found no checkpoint files")
        self._directory = Path(checkpoint_files[0]).parent
        # Structure is checked before anything is read; the values when they are.
        # transformers makes the model under the meta device, which files cannot be read into.
        with torch.device("cpu"):
            Checkpoint.open(self._directory).close()
        # transformers is given a file without tensors: it would take packed weights for missing ones, warn,
        # and fill them at random. What it leaves is filled, or refused, once it is done.
        self._scratch = tempfile.TemporaryDirectory()
        empty = str(Path(self._scratch.name) / "empty.safetensors")
        save_file({}, empty, metadata={"format": "pt"})
        checkpoint_files[:] = [empty]
        model._keys_to_ignore_on_load_missing = {"."}
        for module in model.modules():
            # Buffers that no file holds are computed when a module is initialised; no more is needed of it.
            module._is_hf_initialized = not module._non_persistent_buffers_set

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        assert self._directory is not None and self._scratch is not None  # noqa: PT018
        self._scratch.cleanup()
        _fill(model, self._directory)
        del model._keys_to_ignore_on_load_missing
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The model's tensors under the names that are stored, pruned matrices as their four parts."""
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        from kernels_ext import bitmap_pack
        from kernels_ext.formats.bitmap import to_checkpoint

        from .checkpoint import WEIGHT_DTYPES
        from .weights import drop_negative_zeros

        state = remove_tied_weights_from_state_dict(model.state_dict(), model)
        state = revert_weight_conversion(model, state)
        stored: dict[str, Tensor] = {}
        for name, tensor in state.items():
            stored[name] = tensor
            if tensor.dim() != 2 or tensor.dtype not in WEIGHT_DTYPES or not _IN_A_BLOCK.search(name):
                continue
            dense = tensor.detach().cpu().clone()
            drop_negative_zeros(dense)
            packed = bitmap_pack(dense)
            if packed.stored_bytes < dense.nbytes:
                del stored[name]
                module = name.removesuffix(".weight")
                stored |= {f"{module}.{part}": value for part, value in to_checkpoint(packed).items()}
        return stored, {}

    def is_serializable(self) -> bool:
        """It can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Parameters are ordinary dense tensors."""
        return True


def _used_rules(model: Any, sources: Iterable[str]) -> list[Any]:
    """transformers' renamings and conversions that fit the stored names: saving applies them backwards."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state = model.state_dict()
    for source in sources:
        rename_source_key(source, renamings, converters, model.base_model_prefix, state)
    return [rule for rule in rules if rule.was_used()]


@torch.no_grad()
def _fill(model: Any, directory: Path) -> None:
    """Read every parameter and stored buffer of a model; raises CheckpointError for any that is not right."""
    from .checkpoint import Checkpoint, TensorEntry, fault
    from .transformers_model import convert, ignored_patterns, map_names, resolve_ties
    from .weights import WeightReader

    with Checkpoint.open(directory) as checkpoint:
        reader = WeightReader(checkpoint, dtype=model.dtype, device=torch.device("cpu"))
        names = map_names(model, checkpoint)
        model._weight_conversions = _used_rules(model, checkpoint.entries)
        tied = set(names.tied)
        resolve_ties(names, reader)
        for name in tied - set(names.tied):
            # The file has other values for it: it needs memory of its own.
            parent, _, leaf = name.rpartition(".")
            own = model.get_parameter(name).detach().clone()
            setattr(model.get_submodule(parent), leaf, nn.Parameter(own))
        wanted = model.state_dict()

        def put(name: str, value: Tensor) -> None:
            target = wanted.pop(name)
            if target.device.type == "meta":
                raise CheckpointError(f"{directory}: {name} is offloaded, which packed models do not support")
            if target.shape != value.shape:
                raise fault(directory, name, f"shape {list(target.shape)}", f"shape {list(value.shape)}")
            target.copy_(value)

        for name, source in names.direct.items():
            target = wanted[name]
            if target.dtype.is_floating_point:
                put(name, reader.tensor(source, tuple(target.shape), target.dtype))
                continue
            entry = checkpoint.entries[source]
            if not isinstance(entry, TensorEntry) or entry.dtype != target.dtype:
                raise fault(entry.file, source, str(target.dtype), str(entry.dtype))
            put(name, checkpoint.read_small(entry))
            reader.mark_used(source)
        for first, conversion in names.conversions.items():
            for name, value in convert(model, first, conversion, reader):
                put(name, value)
        missing = [name for name in wanted if name not in names.tied]
        if missing:
            shape = list(wanted[missing[0]].shape)
            raise fault(directory, missing[0], f"a tensor of shape {shape}", "none")
        reader.check_all_used(ignored_patterns(model))
