"""Comparison of specray with other inference servers over the same prompts, in turns."""
