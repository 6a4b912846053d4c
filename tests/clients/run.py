"""Runs unmodified clients against a server; run by ``make clients`` in an environment of its own.

Prints a line for each check, and exits with 1 if one failed. A check of tools is skipped where the model's
chat template shows none.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.clients import evaluation, libraries, proxy
from tests.clients.checks import CHECKS, NO_TOOLS, Server, openai_client

assert all((evaluation, libraries, proxy)), "they register their checks"


def run(server: Server, clients: Sequence[str]) -> int:
    """Runs the checks of the clients; returns the number of those that failed."""
    num_failed = 0
    for client in clients:
        for function in CHECKS[client]:
            started_s = time.monotonic()
            try:
                function(server)
                result = "pass"
            except Exception as error:
                is_skipped = NO_TOOLS in str(error)
                result = "skip (the chat template shows no tools)" if is_skipped else "FAIL"
                if not is_skipped:
                    num_failed += 1
                    traceback.print_exc()
            seconds = time.monotonic() - started_s
            print(f"{client:18} {function.__name__:45} {result:6} {seconds:6.1f} s", flush=True)
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="address of the server, without /v1")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--key", default="unused")
    parser.add_argument("--samples", type=Path, help="file for the scores that lm_eval has read (JSON)")
    parser.add_argument("--clients", nargs="*", default=list(CHECKS), choices=list(CHECKS))
    options = parser.parse_args()
    server = Server(options.url.rstrip("/"), options.model or "", options.key, options.samples)
    if not server.model:
        server = replace(server, model=openai_client(server).models.list().data[0].id)
    print(f"model {server.model}")
    return 1 if run(server, options.clients) else 0


if __name__ == "__main__":
    sys.exit(main())
