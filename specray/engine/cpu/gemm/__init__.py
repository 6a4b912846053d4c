"""CPU kernels that multiply rows by bfloat16 weights."""
