"""Decoders with quantised weights: which weights, and the parts that are made of them."""
