"""Checks grammars of requests before a router is asked, off the event loop and a few at a time."""

from __future__ import annotations

import asyncio
import threading

from specray.errors import InvalidRequestError
from specray.grammar import GrammarCompiler
from specray.serving.validation import Limits
from specray.tokenization import Tokenizer
from specray.types import Grammar

_MAX_CHECKS = 2
"""Grammars that are compiled at a time; the others wait."""
_TIMEOUT_S = 10.0
"""Seconds that a check may take, waiting included; the work itself is bounded by counted steps."""


class GrammarChecker:
    """Compiles grammars as the target will.

    Args:
        tokenizer: the target's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()
        self._turns = asyncio.Semaphore(_MAX_CHECKS)

    async def check(self, grammar: Grammar, *, field: str, limits: Limits) -> None:
        """Raises InvalidRequestError, naming ``field`` and the keyword, for what cannot be enforced."""
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._turns:
                await asyncio.to_thread(self._check, grammar, field, limits)
        except TimeoutError:
            raise InvalidRequestError(
                f"{field} could not be checked within {_TIMEOUT_S:g} s; allowed: a simpler one", field=field
            ) from None

    def _check(self, grammar: Grammar, field: str, limits: Limits) -> None:
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
        self._compiler.check(grammar, field=field)
