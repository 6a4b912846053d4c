"""A scripted draft as a process of its own: ``python worker_process.py ADDRESS``."""

from __future__ import annotations

import sys

from rpc_engines import ScriptedDraft

from specray.rpc.worker import serve_engine

if __name__ == "__main__":
    serve_engine(ScriptedDraft, role="draft", address=sys.argv[1], grace_s=1.0)
