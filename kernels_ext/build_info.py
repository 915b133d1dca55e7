"""What this build of kernels_ext contains and what this machine can run of it.

`python -m kernels_ext` prints it.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from . import _build_info
from .ops import cpu_isa


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """Facts about the compiled modules.

    Attributes:
        cuda_built: the build has CUDA kernels.
        cuda_loaded: they are registered in this process.
        cuda_reason: how they were built, or why they are missing or not loaded.
        cpu_isa: the instruction set the CPU kernels use here.
        compiler: name and version of the C++ compiler.
        build_type: CMake's build type.
        built_with_torch: the torch whose headers were used.
        torch_version: the torch that is running.
        torch_threads: threads that torch gives the CPU kernels.
        machine: processor architecture.
    """

    cuda_built: bool
    cuda_loaded: bool
    cuda_reason: str
    cpu_isa: str
    compiler: str
    build_type: str
    built_with_torch: str
    torch_version: str
    torch_threads: int
    machine: str

    def __str__(self) -> str:
        cuda = "yes" if self.cuda_loaded else "built, not loaded" if self.cuda_built else "no"
        rows = [
            ("CUDA kernels", f"{cuda} ({self.cuda_reason})"),
            ("CPU kernels", f"{self.cpu_isa} ({self.machine}, {self.torch_threads} threads)"),
            ("compiled by", f"{self.compiler}, {self.build_type}"),
            ("torch", f"{self.torch_version} (built with {self.built_with_torch})"),
        ]
        return "\n".join(f"{name:<13}{value}" for name, value in rows)


def load_cuda_kernels() -> str | None:
    """Load the CUDA module if it can be used. Returns why it was not loaded, or None."""
    if not _build_info.CUDA_BUILT:
        return _build_info.CUDA_REASON
    if torch.version.cuda is None:
        return f"{_build_info.CUDA_REASON}; torch {torch.__version__} is a CPU-only build"
    try:
        from . import _C_cuda  # noqa: F401
    except ImportError as error:
        # Not silent: the reason is in build_info(), and asking for a CUDA kernel raises with it.
        return f"{_build_info.CUDA_REASON}; loading failed: {error}"
    return None


def build_info() -> BuildInfo:
    """Describe this build and this machine."""
    not_loaded = load_cuda_kernels()  # a module that is loaded already is not loaded again
    return BuildInfo(
        cuda_built=_build_info.CUDA_BUILT,
        cuda_loaded=not_loaded is None,
        cuda_reason=not_loaded or _build_info.CUDA_REASON,
        cpu_isa=cpu_isa(),
        compiler=_build_info.COMPILER,
        build_type=_build_info.BUILD_TYPE,
        built_with_torch=_build_info.TORCH_VERSION,
        torch_version=torch.__version__,
        torch_threads=torch.get_num_threads(),
        machine=platform.machine(),
    )
