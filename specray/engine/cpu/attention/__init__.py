"""Attention kernels for CPU."""
