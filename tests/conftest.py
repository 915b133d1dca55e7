"""What all tests share: the rule for tests that need a GPU."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--require-gpu` is for the machine that must not skip."""
    parser.addoption(
        "--require-gpu", action="store_true", help="Fail tests marked `gpu` where they cannot run, not skip."
    )


@pytest.fixture(autouse=True)
def _gpu_or_skip(request: pytest.FixtureRequest) -> None:
    """Skip a test marked `gpu`, with the reason, where it cannot run."""
    marker = request.node.get_closest_marker("gpu")
    if marker is None:
        return
    capability = marker.kwargs.get("capability", (8, 0))
    import torch

    import kernels_ext

    if not kernels_ext.CUDA_LOADED:
        reason = f"no CUDA kernels: {kernels_ext.build_info().cuda_reason}"
    elif not torch.cuda.is_available():
        reason = "torch sees no GPU"
    elif torch.cuda.get_device_capability() < capability:
        reason = f"needs compute capability {capability}, found {torch.cuda.get_device_capability()}"
    else:
        return
    if request.config.getoption("--require-gpu"):
        pytest.fail(reason)
    pytest.skip(reason)
