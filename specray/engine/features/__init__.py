"""Drafters on the target that read its features: checkpoints, forwards, and drafting with them."""
