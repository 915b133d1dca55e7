"""Compiled module: CUDA kernels. Importing it registers them; it has no members."""
