"""Work of a step that no engine waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Later:
    """Keeps calls until the messages of the step have left; then ``run`` makes them, in order.

    Counting a round costs a tenth of a millisecond when the caches are cold after a forward, and both engines
    would idle meanwhile.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: Callable[..., None], *arguments: Any) -> None:
        """Keeps ``call(*arguments)``."""
        self._calls.append((call, arguments))

    def run(self) -> None:
        """Makes all calls that are kept."""
        calls, self._calls = self._calls, []
        for call, arguments in calls:
            call(*arguments)
