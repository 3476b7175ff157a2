"""CPU kernels that Numba compiles.

`source/` is what Numba compiles. The modules here run the machine code, and import neither Numba
nor `source/` unless something has to be compiled.
"""
