"""The OpenAI-compatible HTTP service: its endpoints, their bodies and its server."""
