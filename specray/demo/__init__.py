"""The embedded pair: a small target and draft for Python code, and the code that trained them."""
