"""The router: the one object that serves every request, and the composition of its parts."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator
from dataclasses import replace

from specray import __version__
from specray.config import AdaptersConfig, RouterConfig, SpeculationConfig
from specray.control.controller import Controller
from specray.engine_info import EngineInfo
from specray.errors import EngineLostError
from specray.interfaces import (
    Clock,
    DrafterSource,
    OutputGrammarFactory,
    RequestTracer,
    StopMatcherFactory,
    Verifier,
)
from specray.requests import GenerateRequest, OutputChunk, RouterLoad, ServiceInfo
from specray.router.admission.adapters import AdapterRoom
from specray.router.admission.load import LoadTeller
from specray.router.admission.queue import AdmissionQueue
from specray.router.admission.sessions import Sessions
from specray.router.choice import ProposerChoice
from specray.router.deferred import Later
from specray.router.draft_model.proposer import ModelProposer
from specray.router.intake import Intake
from specray.router.live_session import LiveSession
from specray.router.loops import serve_rounds
from specray.router.observer import ControlObserver
from specray.router.output.stream_sink import StreamSink
from specray.router.proposers.factory import ProposerFactory
from specray.router.readiness import Readiness
from specray.router.rounds import Rounds
from specray.router.settings import Settings
from specray.router.trace import Trace, encode_trace
from specray.router.transport.clock import SystemClock
from specray.router.transport.leases import DraftLeases
from specray.router.transport.links import Inbox, TargetLink, current_info
from specray.router.transport.renewal import TargetRenewal, VerifierFactory
from specray.telemetry.metrics import RouterMetrics
from specray.types import DraftKind

logger = logging.getLogger(__name__)


class Router:
    """interfaces.RouterClient over one target group and a leased draft.

    Sessions live here and nowhere else. A lost draft costs speed only. A lost target is connected anew when
    ``verifier`` is a factory: sessions pause, come back with ``base_len`` 0 and go on with the same tokens;
    when that fails within ``start_timeout_s``, or ``verifier`` is a plain connection, every session gets
    EngineLostError.

    Args:
        verifier: a connection to the target, or what makes one (called again after a loss).
        drafters: where draft models are leased; None: there is none.
        router: the section of the configuration: queues, budgets and deadlines.
        speculation: the section of the configuration: how draft and target work together.
        model: the served model's name; default: the target's.
        clock: all time is read from it.
        stop_matchers: for stop strings; without it requests that have some are refused.
        grammars: for what a grammar says of draft tokens; None: they are drafted for without.
        metrics: default: a fresh registry.
        tracer: receives traced requests when they end; None: nobody does.
        draft: what drafts for requests that do not say; without ``drafters``, MODEL is plain decoding.
        draft_on_demand: a draft is leased only when some request could use one.
        adapters: the section of the configuration: those that the target loads; None: it loads none.
        seed: of the jitter of retries.

    Attributes:
        controller: chooses plans.
        sessions: requests that wait or run.
    """

    def __init__(
        self,
        verifier: Verifier | VerifierFactory,
        drafters: DrafterSource | None = None,
        *,
        router: RouterConfig | None = None,
        speculation: SpeculationConfig | None = None,
        model: str | None = None,
        clock: Clock | None = None,
        stop_matchers: StopMatcherFactory | None = None,
        grammars: OutputGrammarFactory | None = None,
        metrics: RouterMetrics | None = None,
        tracer: RequestTracer | None = None,
        draft: DraftKind = DraftKind.MODEL,
        draft_on_demand: bool = False,
        adapters: AdaptersConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.metrics = metrics or RouterMetrics()
        self._drafters = drafters
        config = router or RouterConfig.model_validate({})
        speculation = speculation or SpeculationConfig.model_validate({})
        self._settings = Settings(config, speculation)
        self._model = model
        self._clock = clock or SystemClock()
        self._rng = random.Random(seed)
        inbox = self._inbox = Inbox()
        self._draft = draft
        self._draft_on_demand = draft_on_demand
        self._trace = Trace(self._clock, config.trace_events)
        observer = ControlObserver(self.metrics, self._trace if config.trace_events else None)
        self.controller = Controller(speculation, observer=observer)
        self._queue: AdmissionQueue[LiveSession] = AdmissionQueue(
            max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens, rng=self._rng
        )
        self._later = Later()
        self._adapters = AdapterRoom(
            self._clock,
            self.metrics,
            running=lambda: {live.adapter for live in self.sessions if live.admitted_s is not None},
            waiting=lambda: {live.adapter for live in self._queue.aside},
            held=lambda: {live.adapter for live in self.sessions},
            pinned=() if adapters is None else adapters.pinned,
            wake=inbox.wake,
        )
        self.sessions = Sessions(
            self._queue, self.metrics, self._release, self._later, tracer, self._adapters
        )
        self._load = LoadTeller(self.sessions, self.controller.cost_model)
        self._intake = Intake(
            self.sessions,
            self.controller,
            ProposerFactory(self.controller, self._settings, has_model=drafters is not None),
            info=self._require_info,
            say_load=self._load.say,
            settings=self._settings,
            clock=self._clock,
            inbox=inbox,
            trace=self._trace,
            draft=draft,
            has_draft_model=drafters is not None,
            stop_matchers=stop_matchers,
            grammars=grammars,
        )
        self._target = TargetRenewal(
            verifier,
            inbox=inbox,
            clock=self._clock,
            config=config,
            controller=self.controller,
            rng=self._rng,
            on_found=self._on_target_found,
            on_given_up=self._on_target_given_up,
        )
        self._max_adapters = None if adapters is None else adapters.max_per_step
        self._rounds: Rounds | None = None
        self._leases: DraftLeases | None = None
        self._info: EngineInfo | None = None
        self._loop: asyncio.Task[None] | None = None
        self._broken: Exception | None = None
        self._is_draining = False
        self._readiness = Readiness(self.complete, self._clock, config.verify_timeout_s)

    # Life

    async def start(self) -> None:
        """Connects the target, leases a draft, and begins to serve.

        Raises:
            EngineLostError: the target cannot be reached within start_timeout_s.
            ConfigError: the draft does not fit the target.
        """
        assert self._loop is None, "start() is called once"
        link = await self._target.connect()
        self._info = link.info
        self.sessions.set_limit(link.info.max_num_seqs)
        self._load.num_cache_tokens = link.info.num_blocks * link.info.block_size
        leases = self._leases = self._make_leases(link.info)
        model = ModelProposer(
            leases,
            self.sessions.running,
            self.controller,
            self.metrics,
            self._later,
            settings=self._settings,
            trace=self._trace,
        )
        self._rounds = Rounds(
            sessions=self.sessions,
            proposers=ProposerChoice(model, self.sessions, self.controller, self._later),
            controller=self.controller,
            inbox=self._inbox,
            settings=self._settings,
            max_adapters=self._max_adapters,
            clock=self._clock,
            metrics=self.metrics,
            later=self._later,
            on_target_lost=self._on_target_lost,
            trace=self._trace,
        )
        self._connect(self._rounds, link)
        if leases is not None:
            try:
                await leases.start()
            except BaseException:
                await link.close(self._clock)
                raise
        self._loop = asyncio.create_task(self._serve(self._rounds))

    async def run(self) -> None:
        """Serves until ``stop``; starts when that has not been done. Raises what broke the loop."""
        if self._loop is None:
            await self.start()
        assert self._loop is not None
        await asyncio.shield(self._loop)
        if self._broken is not None:
            raise self._broken

    def configure(self, router: RouterConfig, speculation: SpeculationConfig) -> None:
        """Works by other live values from the next round on. Running requests keep the K that they have."""
        self._settings.swap(router, speculation)
        self._queue.set_bounds(max_requests=router.max_queued_requests, max_tokens=router.max_queued_tokens)
        self.controller.configure(speculation)
        self._inbox.wake()

    @property
    def failure(self) -> EngineLostError | None:
        """Why it serves no more and never will again; None also while a lost target is being sought."""
        if self._broken is not None:
            return EngineLostError(f"the router failed: {self._broken}")
        if self._target.lost is not None:
            return EngineLostError(f"the target was lost: {self._target.lost}")
        return None

    async def stop(self, drain: bool = False, *, drain_timeout_s: float = math.inf) -> None:
        """Takes no new requests, ends or (``drain``) finishes those it has, and closes all connections.

        Args:
            drain_timeout_s: what is not finished by then is ended.
        """
        self._is_draining = True
        self._intake.close()
        if self._rounds is None:
            return
        end_s = self._clock.monotonic() + drain_timeout_s
        while drain and len(self.sessions) and self._broken is None and self._clock.monotonic() < end_s:
            # Sessions end by themselves or by their deadline; there is nothing to be woken by.
            await self._clock.sleep(0.01)
        self._fail_all(EngineLostError("the service is stopping; the request may be sent again"))
        self._rounds.flush()
        self._rounds.close()
        if self._loop is not None:
            await asyncio.gather(self._loop, return_exceptions=True)
        await self._target.stop()
        await self._adapters.stop()
        self._rounds.cancel_alarm()
        await self._rounds.proposers.model.close()
        if self._rounds.target is not None:
            await self._rounds.target.close(self._clock)

    # interfaces.RouterClient

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        return await self._intake.complete(request)

    def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        return self._intake.stream(request)

    async def deliver(self, request: GenerateRequest, sink: StreamSink) -> None:
        """The output through ``sink``, as it is committed; returns when it is complete.

        Cancelling the call aborts the request. Raises like ``complete``, and what ends the sink.
        """
        await self._intake.deliver(request, sink)

    async def service_info(self) -> ServiceInfo:
        info = self._require_info()
        assert self._rounds is not None
        return ServiceInfo(
            model=self._model or info.model,
            draft_model=self._draft_name,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            protocol_version=info.protocol_version,
            version=__version__,
            checkpoint=info.checkpoint,
            is_deterministic=info.is_deterministic,
            isa=info.isa,
        )

    @property
    def _draft_name(self) -> str | None:
        """Name of the draft model leased last, or the kind of what drafts without one."""
        if self._draft is not DraftKind.MODEL:
            return self._draft.value
        return None if self._leases is None else self._leases.model

    async def check_ready(self) -> None:
        """See interfaces.RouterClient. A verdict of the last seconds counts as the real step."""
        self._require_info()
        assert self._rounds is not None
        if self._rounds.target is None:
            raise EngineLostError("the target was lost and is being started anew")
        await self._readiness.check(self._rounds)

    async def metrics_text(self) -> str:
        target = None if self._rounds is None else self._rounds.target
        draft = None if self._leases is None else self._leases.link
        infos = await asyncio.gather(current_info(target, self._clock), current_info(draft, self._clock))
        for role, info in zip(("target", "draft"), infos, strict=True):
            self.metrics.observe_engine(role, info)
        if self._info is not None and self._info.max_adapters:
            running, waiting = (
                {ref.name for live in lives if (ref := live.session.request.adapter) is not None}
                for lives in (self.sessions.running.values(), self._queue)
            )
            self.metrics.adapters.show_requests(self._info.max_adapters, running, waiting)
        return self.metrics.text()

    async def trace_text(self) -> str | None:
        return encode_trace(self._trace.events) if self._settings.router.trace_events else None

    def load(self) -> dict[str, float]:
        return self.sessions.load()

    def routing_load(self) -> RouterLoad:
        """How busy this router is, for those who choose between routers."""
        return self._load.say()

    # interfaces.AdapterManager

    async def load_adapter(self, folder: str, digest: bytes = b"", *, is_pinned: bool = False) -> bytes:
        self._require_info()
        return await self._adapters.load(folder, digest, is_pinned=is_pinned)

    async def unload_adapter(self, digest: bytes) -> None:
        self._require_info()
        await self._adapters.unload(digest)

    def _require_info(self) -> EngineInfo:
        if self.failure is not None:
            raise self.failure
        if self._info is None:
            raise EngineLostError("the router has not started")
        return self._info

    def _release(self, request_id: str) -> None:
        if self._rounds is not None:
            self._rounds.release(request_id)

    def _fail_all(self, error: EngineLostError) -> None:
        self.sessions.fail_all(error, self._clock.monotonic())

    # Target and loop

    async def _serve(self, rounds: Rounds) -> None:
        try:
            await serve_rounds(rounds)
        except Exception as error:
            # A bug must end requests with an error, not leave them waiting for ever.
            logger.exception("the router's loop failed")
            self._broken = error
            self._fail_all(EngineLostError(f"the router failed: {error}"))
        finally:
            rounds.settle()

    def _on_target_lost(self, link: TargetLink, error: Exception) -> None:
        self._adapters.lose()
        self._target.on_lost(link, error, is_stopping=self._is_draining)

    def _on_target_found(self, link: TargetLink) -> None:
        assert self._rounds is not None and self._info is not None
        if link.info.checkpoint != self._info.checkpoint:
            # Its files were changed while it was away: nothing that was begun may go on.
            self._fail_all(EngineLostError("another target serves now; the request may be sent again"))
            self._info = replace(self._info, checkpoint=link.info.checkpoint)
        # It may know adapters where the last one did not.
        self._info = replace(self._info, max_adapters=link.info.max_adapters)
        self._connect(self._rounds, link)

    def _connect(self, rounds: Rounds, link: TargetLink) -> None:
        self._adapters.connect(link)
        rounds.connect(link)

    def _on_target_given_up(self, error: Exception) -> None:
        self._fail_all(EngineLostError(f"the target was lost: {error}"))
        self._inbox.wake()

    def _make_leases(self, info: EngineInfo) -> DraftLeases | None:
        if self._drafters is None:
            return None
        return DraftLeases(
            self._drafters,
            info,
            inbox=self._inbox,
            clock=self._clock,
            metrics=self.metrics,
            rng=self._rng,
            controller=self.controller,
            on_demand=self._draft_on_demand,
        )
