"""A worker process with fake engines that report the time of their steps, by rows."""

from __future__ import annotations

import sys

from specray.fakes import FakeDraft, FakeTarget, PerfectGuesser, ToyModel
from specray.fakes.engines import fake_info
from specray.rpc.workers.worker import serve_engine

TARGET_NS = 100_000
"""Nanoseconds per row."""
DRAFT_NS = 20_000
"""Nanoseconds per draft token, whatever the number of sequences."""
VOCAB_SIZE = 8192

if __name__ == "__main__":
    role, _, listen, _ = sys.argv[1:]
    model = ToyModel(vocab_size=VOCAB_SIZE)
    address = listen.removeprefix("--listen=")
    info = fake_info(role, vocab_size=VOCAB_SIZE)
    if role == "draft":
        serve_engine(
            lambda: FakeDraft(PerfectGuesser(model), info=info, cost=lambda steps: DRAFT_NS * max(1, steps)),
            role="draft",
            address=address,
        )
    else:
        serve_engine(
            lambda: FakeTarget(model, info=info, cost=lambda rows: TARGET_NS * rows),
            role="target",
            address=address,
        )
