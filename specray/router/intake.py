"""Takes requests in: checks each, opens its session, and hands its output to whoever asked."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from specray.control.controller import Controller
from specray.engine_info import EngineInfo
from specray.errors import EngineLostError, InvalidRequestError
from specray.interfaces import Clock, OutputGrammarFactory, StopMatcherFactory
from specray.requests import GenerateRequest, OutputChunk, RouterLoad
from specray.router.admission.checks import check_request
from specray.router.admission.sessions import Sessions
from specray.router.live_session import LiveSession
from specray.router.output.delivery import Delivery
from specray.router.output.stream_sink import StreamSink
from specray.router.proposers.factory import ProposerFactory
from specray.router.session.session import Session
from specray.router.settings import Settings
from specray.router.trace import Trace
from specray.router.transport.links import Inbox
from specray.types import DraftKind


class Intake:
    """The calls of a router that generate.

    Args:
        info: returns what the target says of itself. Raises EngineLostError while nothing is served.
        say_load: returns how busy the router is, for the chunks of an output.
        draft: what drafts for requests that do not say.
        stop_matchers, grammars: as for ``Router``.
    """

    def __init__(
        self,
        sessions: Sessions,
        controller: Controller,
        proposers: ProposerFactory,
        *,
        info: Callable[[], EngineInfo],
        say_load: Callable[[], RouterLoad],
        settings: Settings,
        clock: Clock,
        inbox: Inbox,
        trace: Trace,
        draft: DraftKind,
        has_draft_model: bool,
        stop_matchers: StopMatcherFactory | None,
        grammars: OutputGrammarFactory | None,
    ) -> None:
        self._sessions = sessions
        self._controller = controller
        self._proposers = proposers
        self._info = info
        self._say_load = say_load
        self._settings = settings
        self._clock = clock
        self._inbox = inbox
        self._trace = trace
        self._draft = draft
        self._has_draft_model = has_draft_model
        self._stop_matchers = stop_matchers
        self._grammars = grammars
        self._compiling: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def close(self) -> None:
        """Refuses all further requests with EngineLostError."""
        self._is_closed = True

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        """See interfaces.RouterClient."""
        live = self._submit(request, Delivery(request.request_id, is_stream=False))
        try:
            return await live.delivery.whole()
        finally:
            self._abandon(live)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        """See interfaces.RouterClient."""
        live = self._submit(request, Delivery(request.request_id, is_stream=True))
        chunks = live.delivery.chunks(self._clock, self._settings.stream_interval_s)
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        finally:
            self._abandon(live)

    async def deliver(self, request: GenerateRequest, sink: StreamSink) -> None:
        """See ``Router.deliver``."""
        live = self._submit(request, sink.open(request.request_id))
        try:
            await sink.wait_ended(live.delivery)
        finally:
            self._abandon(live)

    def _submit(self, request: GenerateRequest, delivery: Delivery) -> LiveSession:
        info = self._info()
        check_request(
            request,
            info,
            has_stop_strings=self._stop_matchers is not None,
            has_draft_model=self._has_draft_model,
        )
        if self._is_closed:
            raise EngineLostError("the service is stopping; the request may be sent again")
        if request.request_id in self._sessions:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use", field="request_id")
        now = self._clock.monotonic()
        delivery.checkpoint = info.checkpoint
        delivery.say_load = self._say_load
        live = LiveSession(
            self._open(request, vocab_size=info.vocab_size),
            delivery,
            self._controller.start_session(request),
            arrived_s=now,
            deadline_s=now + min(self._settings.router.request_timeout_s, request.timeout_s or math.inf),
            local=self._proposers.local(
                request, request.speculation.draft or self._draft, num_sessions=len(self._sessions) + 1
            ),
            prediction=self._proposers.prediction(request),
            watch=self._trace.watch(request.request_id) if request.speculation.reports_rounds else None,
        )
        if live.is_resumed:
            # What comes next is no first token.
            live.committed_s = now
        self._sessions.submit(live, now)
        if live.session.is_finished:
            self._sessions.end(live, now)
        self._inbox.wake()
        return live

    def _abandon(self, live: LiveSession) -> None:
        if not live.delivery.is_ended:
            self._sessions.abort(live.request_id, self._clock.monotonic())
            self._inbox.wake()

    def _open(self, request: GenerateRequest, *, vocab_size: int) -> Session:
        """The session of a checked request; its grammar is compiled during its first rounds."""
        if request.sampling.num_prompt_tokens != len(request.prompt_token_ids):
            sampling = replace(request.sampling, num_prompt_tokens=len(request.prompt_token_ids))
            request = replace(request, sampling=sampling)
        matcher = None
        if self._stop_matchers is not None and request.stop:
            matcher = self._stop_matchers(request.stop, request.prompt_token_ids)
        session = Session(request, matcher, vocab_size=vocab_size)
        if self._grammars is not None and request.sampling.grammar is not None:
            task = asyncio.create_task(_compile(self._grammars, session))
            self._compiling.add(task)
            task.add_done_callback(self._compiling.discard)
        return session


async def _compile(grammars: OutputGrammarFactory, session: Session) -> None:
    sampling = session.request.sampling
    assert sampling.grammar is not None
    session.guide.grammar = await grammars(sampling.grammar, sampling.stop_token_ids)
