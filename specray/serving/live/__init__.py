"""Changes of a running service from outside: where it runs, and how its replicas take live values."""
