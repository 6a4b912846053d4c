"""The server of one engine: streams in front, the engine behind."""
