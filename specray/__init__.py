"""specray: speculative decoding as a distributed service on Ray."""

import os

__version__ = "0.1.0"

# Before gRPC starts in this process. Its fork handlers are on unless this says otherwise, and run between
# fork and exec in the child of a process that uses gRPC: measured, 553 of 3000 such children died of SIGSEGV
# or SIGABRT there, which subprocess reports as a start that worked (so a Ray here had no GCS), and some took
# the parent's channels with them. Without the handlers none of 2553 died. A process that goes on with gRPC
# after a fork and no exec, which nothing of ours does, sets it to 1.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
