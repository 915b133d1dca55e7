"""`python -m kernels_ext`: print what this build contains."""

from .build_info import build_info

print(build_info())
