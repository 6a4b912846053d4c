"""Lets Serve's controller of a Ray of our own ask for the nodes every 5 s, not in each of its looks.

Called within the controller, by ``RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH``.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any, Final

PERIOD_S: Final = 5.0
"""Seconds between two questions: the delay until a lost or drained node is noticed; a Ray of our own has one.
Each is three calls of the GCS, which were five sixths of a look; there are four looks a second."""


def ask_seldom() -> None:
    """Replaces the question, which is not public; where there is none of that name, Serve stays as it is."""
    from ray.serve._private import cluster_node_info_cache

    cache: Any = getattr(cluster_node_info_cache, "ClusterNodeInfoCache", None)
    if hasattr(cache, "update"):
        cache.update = at_most_every(PERIOD_S, cache.update)


def at_most_every(
    period_s: float, ask: Callable[[Any], object], *, monotonic: Callable[[], float] = time.monotonic
) -> Callable[[Any], None]:
    """Returns a method that calls ``ask``, unless it has for this object within ``period_s`` seconds.

    A call that raises does not count.
    """

    @functools.wraps(ask)
    def asked(cache: Any) -> None:
        now_s = monotonic()
        if now_s - getattr(cache, "specray_asked_s", -math.inf) >= period_s:
            ask(cache)
            cache.specray_asked_s = now_s

    return asked
