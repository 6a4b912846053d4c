"""Models that are fetched by name or read from GGUF files, checked, converted once and kept on disk."""
