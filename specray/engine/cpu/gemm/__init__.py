"""Matrix-product kernels for CPU: rows times bfloat16 weights."""
