"""Checks grammars of requests ahead of the router: off the event loop, one at a time, no flood of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from specray.errors import InvalidRequestError, OverloadedError
from specray.grammar import GrammarCompiler, PreparedCompiler
from specray.serving.validation import Limits
from specray.types import Grammar

MAX_HOLD_S = 0.5
"""Seconds for which the answer that refuses a grammar is held back at most."""
_TIMEOUT_S = 10.0
"""Seconds to the end of a check, waiting included; the work itself is bounded by counted steps."""
_REFUSAL_SHARE = 0.05
"""Share of one processor that refused grammars cost where one caller sends one after the other."""
_CALL_S = 0.005
"""Processor seconds of a refused call beside the work on its grammar."""
_MAX_DEBT_S = 2.0
"""Seconds after which a flood is forgotten."""


ResultT = TypeVar("ResultT")


class RefusalPace:
    """Spaces out the answers that refuse grammars, so that a flood of them takes little from others.

    Whoever sends a wrong grammar now and then does not wait; whoever sends one after the other is answered
    the more slowly the more work they are.

    Args:
        monotonic: clock in seconds.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._free_s = 0.0
        """When the work on all refused grammars is made up for."""

    def hold_s(self, work_s: float) -> float:
        """Returns seconds for which the answer is to be held back.

        Args:
            work_s: processor seconds of the work on the refused grammar.
        """
        now_s = self._monotonic()
        debt_s = max(self._free_s - now_s, 0.0)
        self._free_s = now_s + min(debt_s + (work_s + _CALL_S) / _REFUSAL_SHARE, _MAX_DEBT_S)
        return min(debt_s, MAX_HOLD_S)


class GrammarChecker:
    """Compiles grammars as the target will, in a thread of its own.

    Args:
        compiler: of the target's tokenizer.
        pace: holds refusals back.
    """

    def __init__(self, compiler: PreparedCompiler, pace: RefusalPace | None = None) -> None:
        self._compiler = compiler
        self._pace = pace or RefusalPace()
        self._thread = ThreadPoolExecutor(1, "specray-grammar-checks")

    async def read(self, read: Callable[[], ResultT], *, field: str) -> ResultT:
        """Reads the fields of a request, of which ``field`` holds a grammar.

        Raises:
            InvalidRequestError: as ``read`` does. OverloadedError: see ``check``.
        """
        return await self._apart(read, field)

    async def check(self, grammar: Grammar, *, field: str, limits: Limits) -> None:
        """Returns if the target can enforce it.

        Raises:
            InvalidRequestError: it cannot; the message names ``field`` and the keyword.
            OverloadedError: too many other grammars were to be checked before it.
        """
        made = self._compiler.made
        if made is not None and made.holds(grammar):
            await self._answer(*_timed(lambda: made.check(grammar, field=field)), field)
        else:
            await self._apart(lambda: self._ready_compiler(field, limits).check(grammar, field=field), field)

    async def _apart(self, work: Callable[[], ResultT], field: str) -> ResultT:
        """Does the work when its turn comes. Whoever gives up waiting leaves the turns as they are."""
        future = self._thread.submit(_timed, work)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                result, work_s = await asyncio.wrap_future(future)
        except TimeoutError:
            if future.cancel():
                raise OverloadedError(f"{field} waited {_TIMEOUT_S:g} s behind other grammars") from None
            raise InvalidRequestError(
                f"{field} could not be checked within {_TIMEOUT_S:g} s; allowed: a simpler one", field=field
            ) from None
        return await self._answer(result, work_s, field)

    async def _answer(self, result: ResultT | InvalidRequestError, work_s: float, field: str) -> ResultT:
        """Returns the result, or raises the refusal when its time has come."""
        if isinstance(result, InvalidRequestError):
            if (result.field or "").startswith(field):
                await asyncio.sleep(self._pace.hold_s(work_s))
            raise result
        return result

    def _ready_compiler(self, field: str, limits: Limits) -> GrammarCompiler:
        reason = f"it has more than the model's {limits.vocab_size} tokens"
        try:
            compiler = self._compiler.get()
            if compiler.vocab_size <= limits.vocab_size:
                return compiler
        except ValueError as error:
            reason = str(error)[:200]
        raise InvalidRequestError(
            f"{field} cannot be enforced with this model's tokenizer: {reason}", field=field
        )


def _timed(work: Callable[[], ResultT]) -> tuple[ResultT | InvalidRequestError, float]:
    """Returns what ``work`` returns, or why it refuses, and the processor seconds that this took."""
    started_s = time.thread_time()
    try:
        result: ResultT | InvalidRequestError = work()
    except InvalidRequestError as error:
        result = error
    return result, time.thread_time() - started_s
