"""Runs unmodified clients against a server; run by ``make clients`` in an environment of its own.

Prints a line for each check, and exits with 1 if one failed. A check of tools is skipped where the model's
chat template shows none.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.clients import agents, evaluation, libraries, proxy, vllm_bench
from tests.clients.checks import CHECKS, NO_TOOLS, SKIPPED, Server, openai_client
from tests.clients.recorder import Recorder, recording

assert all((agents, evaluation, libraries, proxy, vllm_bench)), "they register their checks"


def run(server: Server, clients: Sequence[str], recorder: Recorder | None = None) -> int:
    """Runs the checks of the clients; returns the number of those that failed."""
    num_failed = 0
    for client in clients:
        if recorder:
            recorder.client = client
        for function in CHECKS[client]:
            started_s = time.monotonic()
            try:
                function(server)
                result = "pass"
            except Exception as error:
                reason = _why_skipped(str(error))
                result = f"skip ({reason})" if reason else "FAIL"
                if not reason:
                    num_failed += 1
                    traceback.print_exc()
            seconds = time.monotonic() - started_s
            print(f"{client:18} {function.__name__:45} {result:6} {seconds:6.1f} s", flush=True)
    return num_failed


def _why_skipped(error: str) -> str | None:
    if NO_TOOLS in error:
        return "the chat template shows no tools"
    return error if error.startswith(SKIPPED) else None


def run_recorded(server: Server, clients: Sequence[str], path: Path) -> int:
    """Runs the checks through a proxy and writes what was sent, a request a line, to the file."""
    with recording(server) as recorder:
        num_failed = run(recorder.server, clients, recorder)
    lines = ",\n".join(json.dumps(request) for request in recorder.requests)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="address of the server, without /v1")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--key", default="unused")
    parser.add_argument("--samples", type=Path, help="file for the scores that lm_eval has read (JSON)")
    parser.add_argument("--record", type=Path, help="file for the requests that were sent (JSON)")
    parser.add_argument("--clients", nargs="*", default=list(CHECKS), choices=list(CHECKS))
    options = parser.parse_args()
    server = Server(options.url.rstrip("/"), options.model or "", options.key, options.samples)
    if not server.model:
        server = replace(server, model=openai_client(server).models.list().data[0].id)
    print(f"model {server.model}")
    if options.record:
        return 1 if run_recorded(server, options.clients, options.record) else 0
    return 1 if run(server, options.clients) else 0


if __name__ == "__main__":
    sys.exit(main())
