"""CPU kernels that Numba compiles on first use. Import lazily: Numba is an optional dependency."""
