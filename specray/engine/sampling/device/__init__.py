"""Sampling where the logits are: one copy of a step's numbers in, and one of its tokens out."""
