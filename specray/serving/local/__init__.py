"""A pair of engines on this machine without Ray."""
