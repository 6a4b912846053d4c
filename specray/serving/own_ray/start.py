"""Starts a Ray of our own, and gives back the handlers of signals that it takes."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from specray.errors import ConfigError
from specray.serving.own_ray.ends import children, end_children
from specray.serving.own_ray.nodes import check_room, lean_head, one_agent


def init_ray(**options: Any) -> Any:
    """Starts a Ray of our own; tries once more if not all of its processes have come up.

    Seen on a busy machine: the node's process ended before its first log line. Processes of the first attempt
    are ended before the second, which would otherwise wait until this process ends.

    Raises:
        ConfigError: neither attempt succeeded, or there is no room for Ray's files.
    """
    import ray

    check_room()
    for is_last in (False, True):
        before = children()
        try:
            with one_agent(), lean_head(log_to_driver=options.get("log_to_driver", True)):
                return ray.init(**options)
        # Ray raises a plain Exception for this; its subclasses are about something else.
        except Exception as error:
            if type(error) is not Exception and not isinstance(error, (RuntimeError, TimeoutError)):
                raise
            reason = " ".join(str(error).split())
            end_children(children() - before)
            if is_last:
                raise ConfigError(f"Ray did not start after two attempts: {reason}") from error
        print(f"specray: Ray did not start, trying once more: {reason}", file=sys.stderr, flush=True)
    raise AssertionError("the last attempt returns or raises")


def signal_handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


def restore_handlers(handlers: dict[int, Any]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
