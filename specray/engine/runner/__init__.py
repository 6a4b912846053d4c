"""The device side of an engine: forwards, their graphs, and ranks that run them together."""
