"""CPU kernels for what torch does in many small operators: compiled at start by numba, no compiler needed."""
