"""GGUF files: what they say they hold."""
