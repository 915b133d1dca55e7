"""Compiled module: op schemas and CPU kernels. Importing it registers them; it has no members."""
