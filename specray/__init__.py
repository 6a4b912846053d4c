"""specray: speculative decoding as a distributed service on Ray."""

__version__ = "0.1.0"
