"""Proof that a running service writes what its target alone would: ``specray verify``."""
