"""Runs one engine as a process: ``specray worker`` without a command line for people."""

from __future__ import annotations

import argparse
import logging
import sys
from functools import partial

from specray.config import load_config
from specray.environment import apply_thread_environment, log_level
from specray.errors import SpecrayError
from specray.rpc.workers.parent import end_with_parent


def main() -> int:
    """Loads the engine and serves it until a signal, or until its parent has ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("draft", "target"))
    parser.add_argument("--config", required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args()
    apply_thread_environment()
    end_with_parent(arguments.parent_pid)
    logging.basicConfig(level=log_level(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from specray.engine.build import build_draft_engine, build_target_engine
    from specray.rpc.workers.worker import serve_engine

    try:
        config = load_config(arguments.config)
        build = build_draft_engine if arguments.role == "draft" else build_target_engine
        serve_engine(
            partial(build, config),
            role=arguments.role,
            address=arguments.listen,
            start_timeout_s=config.router.start_timeout_s,
        )
    except SpecrayError as error:
        print(f"specray: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
