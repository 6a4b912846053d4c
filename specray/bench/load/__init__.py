"""Load generators for a running server, and the times of what came back."""
