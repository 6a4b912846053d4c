"""``specray bench gpu``: checks the tokens that an accelerator computes, and measures its speed.

Needs the package, torch, transformers and grpcio, but neither Ray nor an HTTP server. Each stage is a process
of its own with a deadline, so that one that crashes or hangs frees its device memory and leaves a line in the
report.
"""
