"""A router over fakes in virtual time, and shorthands for requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from specray.config import RouterConfig, SpeculationConfig
from specray.control.controller import Controller
from specray.errors import EngineLostError
from specray.fakes import (
    FakeDraft,
    FakeDrafterSource,
    FakeTarget,
    LocalDrafter,
    LocalVerifier,
    NoisyGuesser,
    ToyModel,
    VirtualClock,
    adapted,
)
from specray.interfaces import Drafter, DrafterSource, Verifier
from specray.requests import GenerateRequest, OutputChunk, SpeculationParams
from specray.router import Router
from specray.router.draft_model.budgets import Budgets
from specray.router.proposers.factory import ProposerFactory
from specray.router.settings import Settings
from specray.types import DraftKind, SamplingParams

P = ParamSpec("P")
T = TypeVar("T")
MODEL = ToyModel()
PROMPT = (3, 1, 4, 1, 5)
TARGET_S = 0.020
DRAFT_STEP_S = 0.004


def in_virtual_time(main: Callable[Concatenate[VirtualClock, P], Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Makes a coroutine that takes a clock a function, which runs it in virtual time."""

    def run(*args: P.args, **options: P.kwargs) -> T:
        clock = VirtualClock()
        return clock.run(main(clock, *args, **options))

    run.__name__, run.__doc__ = main.__name__, main.__doc__
    return run


def request(
    request_id: str = "a",
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 24,
    *,
    stop: tuple[str, ...] = (),
    eos: tuple[int, ...] = (),
    speculation: SpeculationParams | None = None,
    **sampling: Any,
) -> GenerateRequest:
    """A request, greedy unless it says otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "num_prompt_tokens": len(prompt), **sampling})
    return GenerateRequest(
        request_id,
        tuple(prompt),
        params,
        max_tokens,
        stop=stop,
        eos_token_ids=eos,
        speculation=speculation or SpeculationParams(),
    )


def expected(given: GenerateRequest) -> tuple[int, ...]:
    """What the target alone writes for it, up to max_tokens."""
    seed = 0 if given.sampling.is_greedy else given.sampling.seed
    return adapted(MODEL, given.sampling.adapter).generate(given.prompt_token_ids, given.max_tokens, seed)


def router_config(**values: Any) -> RouterConfig:
    return RouterConfig.model_validate(values)


def speculation_config(**values: Any) -> SpeculationConfig:
    return SpeculationConfig.model_validate(values)


def budgets(controller: Controller) -> Budgets:
    return Budgets(controller.cost_model, max_k=lambda: controller.max_k)


def factory(controller: Controller | None = None, **config: Any) -> ProposerFactory:
    """Makes the proposers of a router that has a draft model."""
    speculation = speculation_config(**config)
    settings = Settings(router_config(), speculation)
    return ProposerFactory(controller or Controller(speculation), settings, has_model=True)


def fake_target(**info: Any) -> FakeTarget:
    """A target of 20 ms per step."""
    target = FakeTarget(MODEL, cost=lambda rows: int(TARGET_S * 1e9))
    return FakeTarget(MODEL, info=replace(target.info, **info), cost=lambda rows: int(TARGET_S * 1e9))


def fake_draft(guesser: Any = None, **info: Any) -> FakeDraft:
    """A draft of 4 ms per token."""
    guesser = guesser or NoisyGuesser(MODEL)
    base = FakeDraft(guesser).info
    return FakeDraft(guesser, info=replace(base, **info), cost=lambda steps: int(steps * DRAFT_STEP_S * 1e9))


@dataclass
class Pair:
    """A running router and what lies behind it."""

    clock: VirtualClock
    router: Router
    target: FakeTarget
    draft: FakeDraft

    def counted(self, name: str, **labels: str) -> float:
        return self.router.metrics.value(name, tuple(labels.items()))

    async def settle(self) -> None:
        """Lets everything that is under way arrive, then checks that nothing is held any more."""
        await asyncio.sleep(1.0)
        assert self.target.held_request_ids == frozenset()
        assert self.draft.held_request_ids == frozenset()
        assert self.counted("specray_running_sessions") == 0
        assert self.counted("specray_queue_depth") == 0


@asynccontextmanager
async def serving(
    clock: VirtualClock,
    *,
    target: FakeTarget | None = None,
    draft: FakeDraft | None = None,
    verifier: Verifier | Callable[[], Coroutine[Any, Any, Verifier]] | None = None,
    make_drafter: Callable[[int], Drafter] | None = None,
    drafters: DrafterSource | None = None,
    config: RouterConfig | None = None,
    has_draft_model: bool = True,
    **options: Any,
) -> AsyncIterator[Pair]:
    """Starts a router and stops it."""
    target = target or fake_target()
    draft = draft or fake_draft()
    source = drafters or FakeDrafterSource(make_drafter or (lambda _: LocalDrafter(draft, clock)))
    stop_matchers, grammars = options.pop("stop_matchers", None), options.pop("grammars", None)
    kind = options.pop("draft_kind", DraftKind.MODEL)
    draft_on_demand = options.pop("draft_on_demand", False)
    tracer = options.pop("tracer", None)
    adapters = options.pop("adapters", None)
    # Most tests count what the draft model does.
    options.setdefault("fallback", "none")
    router = Router(
        verifier or LocalVerifier(target, clock),
        source if has_draft_model else None,
        router=config or router_config(),
        speculation=speculation_config(**options),
        clock=clock,
        stop_matchers=stop_matchers,
        grammars=grammars,
        draft=kind,
        draft_on_demand=draft_on_demand,
        tracer=tracer,
        adapters=adapters,
    )
    await router.start()
    try:
        yield Pair(clock, router, target, draft)
    finally:
        await router.stop()


def no_draft(number: int) -> Drafter:
    raise EngineLostError("no draft")


D = TypeVar("D", bound=Drafter)


def leasing(
    make: Callable[[int], D], missing: Container[int] = ()
) -> tuple[list[D], Callable[[int], Drafter]]:
    """The drafters that a router has leased, and how it leases the next; none of the ``missing`` numbers."""
    leased: list[D] = []

    def lease(number: int) -> Drafter:
        if number in missing:
            return no_draft(number)
        leased.append(make(number))
        return leased[-1]

    return leased, lease


def of_tenant(request_id: str, tenant: str, *, max_tokens: int = 4, priority: int = 0) -> GenerateRequest:
    speculation = SpeculationParams(enabled=False, tenant=tenant)
    one = request(request_id, max_tokens=max_tokens, speculation=speculation)
    return replace(one, priority=priority)


def charged(pair: Pair, tenant: str) -> int:
    """Tokens at which the tenant's next waiting request starts."""
    return pair.router.sessions.queue.classes[0].lines[tenant].tag


async def begin(pair: Pair, ended: list[str], one: GenerateRequest) -> asyncio.Task[None]:
    """Sends a request; when it ends its id is appended, and its tokens are the right ones."""
    (task,) = await begin_at_once(pair, ended, one)
    return task


async def begin_at_once(pair: Pair, ended: list[str], *requests: GenerateRequest) -> list[asyncio.Task[None]]:
    """Sends requests which the router sees together."""

    async def work(one: GenerateRequest) -> None:
        output = await pair.router.complete(one)
        assert output.token_ids == expected(one)
        ended.append(one.request_id)

    tasks = [asyncio.create_task(work(one)) for one in requests]
    await asyncio.sleep(0)
    return tasks


async def chunks_of(pair: Pair, given: GenerateRequest) -> list[tuple[float, OutputChunk]]:
    return [(pair.clock.monotonic(), chunk) async for chunk in pair.router.stream(given)]


async def complete(pair: Pair, **options: Any) -> OutputChunk:
    given = request(**options)
    output = await pair.router.complete(given)
    assert output.token_ids == expected(given)
    return output
