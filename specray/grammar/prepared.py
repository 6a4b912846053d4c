"""A compiler that is made once, ahead of the first grammar.

For a large vocabulary that takes seconds, in which no other thread of the process runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Self

from specray.grammar.compiler import GrammarCompiler
from specray.grammar.vocabulary import ModelTokenizer

logger = logging.getLogger(__name__)


class PreparedCompiler:
    """Makes a compiler at first need, or before. Safe to use from several threads.

    Args:
        make: makes it. What it raises is raised to who needs the compiler, and it is tried again.
    """

    def __init__(self, make: Callable[[], GrammarCompiler]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    @classmethod
    def of(cls, tokenizer: ModelTokenizer) -> Self:
        """The compiler of a tokenizer, whose vocabulary is taken as the model's."""

        def make() -> GrammarCompiler:
            return GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size)

        return cls(make)

    @property
    def made(self) -> GrammarCompiler | None:
        """The compiler; None: it is not made yet."""
        return self._compiler

    def get(self) -> GrammarCompiler:
        """The compiler. Waits until it is made, and raises why it cannot be."""
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make()
            return self._compiler

    def prepare(self) -> threading.Thread:
        """Makes the compiler in a thread.

        Returns:
            The thread, which has begun.
        """
        # No daemon: the interpreter cannot end amid this work.
        thread = threading.Thread(target=self._try, name="specray-grammars")
        thread.start()
        return thread

    def _try(self) -> None:
        try:
            self.get()
        except Exception as error:
            # Most requests have no grammar; the first that has one is refused.
            logger.info("no grammar can be enforced: %s", error)
