"""Ends a worker process together with the process that started it."""

from __future__ import annotations

import os
import signal
import threading
import time


def end_with_parent(parent_pid: int, *, period_s: float = 1.0) -> None:
    """Sends this process SIGTERM once its parent has ended for any reason, even before this call."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(period_s)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
