"""Checks grammars of requests ahead of the router: off the event loop, one at a time, no flood of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from specray.errors import InvalidRequestError
from specray.grammar import GrammarCompiler
from specray.serving.validation import Limits
from specray.tokenization import Tokenizer
from specray.types import Grammar

MAX_HOLD_S = 0.5
"""Seconds for which the answer that refuses a grammar is held back at most."""
_TIMEOUT_S = 10.0
"""Seconds that a check may take, waiting included; the work itself is bounded by counted steps."""
_REFUSAL_SHARE = 0.05
"""Share of one processor that refused grammars may cost, as long as their callers wait for their answers."""
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
    """Compiles grammars as the target will.

    Args:
        tokenizer: the target's.
        pace: holds refusals back.
    """

    def __init__(self, tokenizer: Tokenizer, pace: RefusalPace | None = None) -> None:
        self._tokenizer = tokenizer
        self._pace = pace or RefusalPace()
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()
        self._turn = asyncio.Lock()

    async def read(self, read: Callable[[], ResultT], *, field: str) -> ResultT:
        """Reads the fields of a request that hold a grammar. Raises InvalidRequestError, as ``read`` does."""
        return await self._in_turn(read, field)

    async def check(self, grammar: Grammar, *, field: str, limits: Limits) -> None:
        """Raises InvalidRequestError, naming ``field`` and the keyword, for what cannot be enforced."""
        await self._in_turn(lambda: self._ready_compiler(field, limits).check(grammar, field=field), field)

    async def _in_turn(self, work: Callable[[], ResultT], field: str) -> ResultT:
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._turn:
                result, work_s = await asyncio.to_thread(_timed, work)
        except TimeoutError:
            raise InvalidRequestError(
                f"{field} could not be checked within {_TIMEOUT_S:g} s; allowed: a simpler one", field=field
            ) from None
        if isinstance(result, InvalidRequestError):
            await asyncio.sleep(self._pace.hold_s(work_s))
            raise result
        return result

    def _ready_compiler(self, field: str, limits: Limits) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                try:
                    self._compiler = GrammarCompiler(
                        self._tokenizer.backend_json,
                        vocab_size=limits.vocab_size,
                        eos_token_ids=limits.eos_token_ids,
                    )
                except ValueError as error:
                    raise InvalidRequestError(
                        f"{field} cannot be enforced with this model's tokenizer: {str(error)[:200]}",
                        field=field,
                    ) from None
            return self._compiler


def _timed(work: Callable[[], ResultT]) -> tuple[ResultT | InvalidRequestError, float]:
    """Returns what ``work`` returns, or why it refuses, and the processor seconds that this took."""
    started_s = time.thread_time()
    try:
        result: ResultT | InvalidRequestError = work()
    except InvalidRequestError as error:
        result = error
    return result, time.thread_time() - started_s
