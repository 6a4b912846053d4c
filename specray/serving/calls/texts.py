"""Work on the texts of calls (bodies, templates, tokens): at once, or in threads by fair turns."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TypeVar

from specray.serving.admission.fair_pool import FairPool, Turn
from specray.serving.admission.limiter import step_aside

_INLINE_CHARS: Final = 4096
"""Characters up to which work is done at once: it takes some milliseconds."""
_SHORT_CHARS: Final = 32 * 1024
"""Characters up to which work has a thread that no longer work can hold."""
_SECONDS_PER_CHAR: Final = 5e-7
_MAX_THREADS: Final = 4

ResultT = TypeVar("ResultT")


class TextWork:
    """The threads of one Ingress for texts, shared by all its endpoints."""

    def __init__(self) -> None:
        num_threads = min(_MAX_THREADS, max(1, (os.cpu_count() or 1) - 1))
        self._short = FairPool(1, "specray-texts", what="texts")
        self._long = FairPool(num_threads, "specray-long-texts", what="texts")

    async def run(
        self, work: Callable[[], ResultT], size: int, turn: Turn, *, is_inline: bool = True
    ) -> ResultT:
        """Returns what ``work`` on about ``size`` characters returns. Raises what FairPool.run raises.

        Args:
            is_inline: False: never on the event loop, however short the text is.
        """
        if is_inline and size <= _INLINE_CHARS:
            return work()
        step_aside()
        pool = self._short if size <= _SHORT_CHARS else self._long
        return await pool.run(work, turn, expected_s=1e-4 + size * _SECONDS_PER_CHAR)
