"""Work on the texts of calls (bodies, templates, tokens): at once, or in threads by fair turns."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TypeVar

from specray.serving.admission.fair_pool import FairPool, Turn
from specray.serving.admission.limiter import step_aside

_INLINE_S: Final = 2e-3
"""Seconds of work that is done at once: that of 4000 characters to tokenize."""
_SHORT_S: Final = 16e-3
"""Seconds of work that has a thread which no longer work can hold: that of 32,000 characters to tokenize."""
SECONDS_PER_CHAR: Final = 5e-7
"""Seconds to tokenize a character."""
SECONDS_PER_BYTE: Final = 1e-7
"""Seconds to read a byte of a body."""

ResultT = TypeVar("ResultT")


class TextWork:
    """The threads of one Ingress for texts, shared by all its endpoints."""

    def __init__(self) -> None:
        num_threads = min(4, max(2, (os.cpu_count() or 1) - 1))
        self._short = FairPool(1, "specray-texts", what="texts")
        # One thread is always there for another tenant than those whose long texts are tokenized.
        self._long = FairPool(num_threads, "specray-long-texts", what="texts", max_per_tenant=num_threads - 1)

    async def run(
        self, work: Callable[[], ResultT], turn: Turn, *, expected_s: float, is_inline: bool = True
    ) -> ResultT:
        """Returns what ``work`` returns. Raises what FairPool.run raises.

        Args:
            expected_s: seconds that it should take.
            is_inline: False: never on the event loop, however short it is.
        """
        if is_inline and expected_s <= _INLINE_S:
            return work()
        step_aside()
        pool = self._short if expected_s <= _SHORT_S else self._long
        return await pool.run(work, turn, expected_s=expected_s)
