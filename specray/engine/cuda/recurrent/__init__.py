"""Kernels of recurrent layers on CUDA."""
