"""``python -m specray.bench.gpu``: whether an accelerator computes the right tokens, and how fast.

Needs the package, torch, transformers and grpcio, and neither Ray nor an HTTP server. Each stage is a
process of its own with a deadline, so that one that crashes or hangs leaves its device memory and a line in
the report.
"""
