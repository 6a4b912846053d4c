"""Recurrent layers beyond the gated delta rule, and the kernels of all on CPU."""
