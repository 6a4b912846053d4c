"""Checks grammars of requests ahead of the router: one at a time, in turns that are fair between tenants."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from specray.errors import InvalidRequestError
from specray.grammar import GrammarCompiler, PreparedCompiler
from specray.serving.admission.fair_pool import ANYBODY, MAX_WAIT_S, FairPool, Turn
from specray.serving.validation import Limits
from specray.types import Grammar

MAX_HOLD_S = 0.5
"""Seconds for which the answer that refuses a grammar is held back at most."""
_MAX_TENANTS = 1024
"""Tenants whose refusals are remembered."""
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
    """Compiles grammars as the target will, in a thread of its own, in turns that are fair between tenants.

    Args:
        compiler: of the target's tokenizer.
        make_pace: makes what holds one tenant's refusals back.
        max_wait_s: longest wait for a turn in seconds.
    """

    def __init__(
        self,
        compiler: PreparedCompiler,
        make_pace: Callable[[], RefusalPace] = RefusalPace,
        *,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        self._compiler = compiler
        self._paces: OrderedDict[str, RefusalPace] = OrderedDict()
        self._make_pace = make_pace
        self._pool = FairPool(1, "specray-grammar-checks", what="grammars", max_wait_s=max_wait_s)

    async def read(self, read: Callable[[], ResultT], *, field: str, turn: Turn = ANYBODY) -> ResultT:
        """Reads the fields of a request, of which ``field`` holds a grammar.

        Raises:
            InvalidRequestError: as ``read`` does. OverloadedError, DeadlineExceededError: see ``check``.
        """
        return await self._answer(*await self._in_turn(lambda: _timed(read), turn), field, turn)

    async def check(self, grammar: Grammar, *, field: str, limits: Limits, turn: Turn = ANYBODY) -> None:
        """Returns if the target can enforce it.

        Raises:
            InvalidRequestError: it cannot; the message names ``field`` and the keyword.
            OverloadedError: grammars of others kept the thread for too long.
            DeadlineExceededError: the time of the turn is over, or the machine is too busy.
        """
        made = self._compiler.made
        if made is not None and made.holds(grammar):
            await self._answer(*_timed(lambda: made.check(grammar, field=field)), field, turn)
            return
        if made is None:
            # To read the tokenizer is no work on the grammar.
            await self._in_turn(lambda: self._ready_compiler(field, limits), turn)
        compiler = self._ready_compiler(field, limits)
        checked = await self._in_turn(lambda: _timed(lambda: compiler.check(grammar, field=field)), turn)
        await self._answer(*checked, field, turn)

    async def _in_turn(self, work: Callable[[], ResultT], turn: Turn) -> ResultT:
        """Does the work when its turn comes. Whoever gives up waiting leaves the turns as they are."""
        # Seconds to the end of a check, waiting included; the work itself is bounded by counted steps.
        latest_s = asyncio.get_running_loop().time() + 30.0
        own_s = latest_s if turn.deadline_s is None else turn.deadline_s
        return await self._pool.run(work, turn._replace(deadline_s=min(own_s, latest_s)))

    async def _answer(
        self, result: ResultT | InvalidRequestError, work_s: float, field: str, turn: Turn
    ) -> ResultT:
        if isinstance(result, InvalidRequestError):
            if (result.field or "").startswith(field):
                await asyncio.sleep(self.pace_of(turn.tenant).hold_s(work_s))
            raise result
        return result

    def pace_of(self, tenant: str) -> RefusalPace:
        pace = self._paces.setdefault(tenant, self._make_pace())
        self._paces.move_to_end(tenant)
        if len(self._paces) > _MAX_TENANTS:
            self._paces.popitem(last=False)
        return pace

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
    started_s = time.thread_time()
    try:
        result: ResultT | InvalidRequestError = work()
    except InvalidRequestError as error:
        result = error
    return result, time.thread_time() - started_s
