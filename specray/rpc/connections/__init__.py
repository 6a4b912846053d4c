"""The router's connections to engines."""
