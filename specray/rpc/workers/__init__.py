"""Server of one engine: routers' streams in front, the engine behind."""
