"""The kernels in Numba's Python. A function here returns a kernel's body and its arguments."""
