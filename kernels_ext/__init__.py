"""Sparse linear kernels for PyTorch: bitmap-compressed weights on CPU and CUDA.

The package stands alone: it needs torch and nothing of the service that ships it. `python -m kernels_ext`
prints what was built.
"""

from __future__ import annotations

from typing import Final

# The modules are compiled against torch's libraries and find them because torch is loaded first.
import torch  # noqa: F401

try:
    from . import _C  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "kernels_ext is not built: its compiled module _C is missing. Install the project (pip install .), "
        "or build in place with CMake (see CONTRIBUTING.md)."
    ) from error

from .build_info import BuildInfo, build_info, load_cuda_kernels
from .formats.lane_stream import LaneStreamPlan
from .lane_stream import (
    LaneStreamUnavailable,
    LaneStreamWeight,
    lane_stream_linear,
    lane_stream_pack,
    lane_stream_unpack,
    lane_stream_workspace,
)
from .ops import (
    BitmapWeight,
    available_isas,
    bitmap_linear,
    bitmap_pack,
    bitmap_unpack,
    cpu_isa,
    dense_linear,
    measure_read_bandwidth,
)

CUDA_LOADED: Final = load_cuda_kernels() is None

__all__ = [
    "CUDA_LOADED",
    "BitmapWeight",
    "BuildInfo",
    "LaneStreamPlan",
    "LaneStreamUnavailable",
    "LaneStreamWeight",
    "available_isas",
    "bitmap_linear",
    "bitmap_pack",
    "bitmap_unpack",
    "build_info",
    "cpu_isa",
    "dense_linear",
    "lane_stream_linear",
    "lane_stream_pack",
    "lane_stream_unpack",
    "lane_stream_workspace",
    "measure_read_bandwidth",
]
