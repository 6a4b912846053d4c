"""Matrix products on CUDA, written in Triton: of experts, and of weights in their own bits."""
