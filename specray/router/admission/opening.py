"""Opens the session of a request, with what watches its stop strings and its grammar."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from specray.interfaces import OutputGrammarFactory, StopMatcherFactory
from specray.requests import GenerateRequest
from specray.router.session.session import Session


class SessionOpener:
    """Makes sessions.

    Args:
        stop_matchers: for stop strings; None: requests that have some are refused.
        grammars: for what a grammar says of draft tokens; None: they are drafted for without.
    """

    def __init__(
        self, stop_matchers: StopMatcherFactory | None, grammars: OutputGrammarFactory | None
    ) -> None:
        self._stop_matchers = stop_matchers
        self._grammars = grammars
        self._compiling: set[asyncio.Task[None]] = set()

    @property
    def has_stop_strings(self) -> bool:
        """Requests may have stop strings."""
        return self._stop_matchers is not None

    def open(self, request: GenerateRequest, *, vocab_size: int) -> Session:
        """Makes the session of a checked request; its grammar is compiled during its first rounds."""
        if request.sampling.num_prompt_tokens != len(request.prompt_token_ids):
            sampling = replace(request.sampling, num_prompt_tokens=len(request.prompt_token_ids))
            request = replace(request, sampling=sampling)
        matcher = None
        if self._stop_matchers is not None and request.stop:
            matcher = self._stop_matchers(request.stop, request.prompt_token_ids)
        session = Session(request, matcher, vocab_size=vocab_size)
        if self._grammars is not None and request.sampling.grammar is not None:
            task = asyncio.create_task(self._compile(self._grammars, session))
            self._compiling.add(task)
            task.add_done_callback(self._compiling.discard)
        return session

    @staticmethod
    async def _compile(grammars: OutputGrammarFactory, session: Session) -> None:
        sampling = session.request.sampling
        assert sampling.grammar is not None
        session.guide.grammar = await grammars(sampling.grammar, sampling.stop_token_ids)
