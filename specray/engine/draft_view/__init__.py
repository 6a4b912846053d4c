"""The draft's own view of a request: another vocabulary, a window."""
