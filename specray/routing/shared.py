"""The choice of a Router that two event loops share: the one that chooses and the one that is answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

from specray.requests import GenerateRequest, OutputChunk, RouterLoad
from specray.routing.choice import Choice, RouterChoice


class SharedChoice:
    """A RouterChoice for the loop that chooses and the loop that hears of answers."""

    def __init__(self) -> None:
        self._choice = RouterChoice(time.monotonic)
        self._lock = threading.Lock()
        self._routers: set[str] = set()

    @property
    def num_routers(self) -> int:
        return len(self._routers)

    @property
    def last(self) -> list[Choice]:
        """The last choices, the oldest first."""
        with self._lock:
            return list(self._choice.last)

    def choose(self, request: GenerateRequest, routers: Sequence[str]) -> list[str]:
        with self._lock:
            return self._choice.choose(request, routers)

    def on_elsewhere(self, request_id: str, router: str) -> None:
        with self._lock:
            self._choice.on_elsewhere(request_id, router)

    def on_chunk(self, chunk: OutputChunk, token_ids: Sequence[int] = ()) -> Choice | None:
        with self._lock:
            return self._choice.on_chunk(chunk, token_ids)

    def on_end(self, request_id: str, error: Exception | None) -> None:
        with self._lock:
            self._choice.on_end(request_id, error)

    def on_routers(self, loads: Mapping[str, RouterLoad | None]) -> None:
        """These Routers take requests now; None: nothing is heard of its load."""
        with self._lock:
            for gone in self._routers - set(loads):
                self._choice.on_gone(gone)
            self._routers = set(loads)
            for router, load in loads.items():
                if load is not None:
                    self._choice.on_load(router, load)


_choices: Final[dict[str, SharedChoice]] = {}
"""Shared choices of this process by the name of the Serve application."""


def shared_choice(app_name: str) -> SharedChoice:
    """The choice of this process between the Routers of an application."""
    return _choices.setdefault(app_name, SharedChoice())
