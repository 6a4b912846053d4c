"""The engine: one process, synchronous, on torch and transformers; no RPC and no Ray."""
