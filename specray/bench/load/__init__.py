"""Load on a running server, and what came back when."""
