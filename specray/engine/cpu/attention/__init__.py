"""CPU attention kernels."""
