"""The weights of the embedded pair: a small target and draft for Python code."""
