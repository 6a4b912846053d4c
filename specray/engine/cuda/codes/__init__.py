"""Weights in the bits that files store, on CUDA: how they lie in memory, and products with them."""
