"""Worker process with a scripted draft: ``python worker_process.py ADDRESS [SECONDS_TO_LOAD]``."""

from __future__ import annotations

import sys
import time

from specray.rpc.workers.worker import serve_engine
from tests.rpc.engines import ScriptedDraft


def load() -> ScriptedDraft:
    if len(sys.argv) > 2:
        print("loading", flush=True)
        time.sleep(float(sys.argv[2]))
    return ScriptedDraft()


if __name__ == "__main__":
    serve_engine(load, role="draft", address=sys.argv[1], grace_s=60.0)
