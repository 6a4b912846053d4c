"""A worker process with fake engines, started as local_router starts ``specray worker``.

With ``--fail`` first it ends before it listens, as a worker whose model is missing does.
"""

from __future__ import annotations

import sys

from specray.fakes import FakeDraft, FakeTarget, PerfectGuesser, ToyModel
from specray.fakes.engines import fake_info
from specray.rpc.workers.worker import serve_engine

if __name__ == "__main__":
    *flags, role, _, listen, _ = sys.argv[1:]
    if flags == ["--fail"]:
        sys.exit("specray: target.model: /models/x does not exist")
    model = ToyModel(vocab_size=264)
    address = listen.removeprefix("--listen=")
    if role == "draft":
        info = fake_info("draft", vocab_size=model.vocab_size)
        serve_engine(lambda: FakeDraft(PerfectGuesser(model), info=info), role="draft", address=address)
    else:
        serve_engine(lambda: FakeTarget(model), role="target", address=address)
