"""CPU kernels that replace chains of small torch operators; numba compiles them at start."""
