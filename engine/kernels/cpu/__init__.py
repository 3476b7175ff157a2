"""Kernels for a CPU, compiled by Numba when they are asked for. Imported lazily: it is an extra."""
