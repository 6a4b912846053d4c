"""Linear layers with quantised weights on CPU."""
