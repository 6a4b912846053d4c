"""Stands for the dashboard's agent of a Ray node, without which a raylet does not start; see ``nodes``.

Run as a script by the raylet. Imports nothing of specray or Ray: it only ends with the raylet.
"""

from __future__ import annotations

import os
import time

PERIOD_S = 1.0


def main() -> None:
    """Returns when the raylet, which Ray names in the environment, is no longer the parent."""
    raylet = int(os.environ["RAY_RAYLET_PID"])
    while os.getppid() == raylet:
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main()
