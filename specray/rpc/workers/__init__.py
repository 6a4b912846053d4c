"""Server of one engine: routers' streams on one side, the engine on the other."""
