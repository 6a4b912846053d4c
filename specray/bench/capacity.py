"""Measures a pair for `specray plan`: short loads through real routers, read from their traces.

Everything is measured as it runs in service: behind gRPC, with the router's work in between, and draft steps
between target steps. An engine alone in a tight loop is faster than it ever is in service.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from specray import __version__
from specray.bench.core.arm import Changes, changed, without_cache
from specray.bench.core.provenance import hardware_name
from specray.bench.core.service import MAX_TRACE_EVENTS, ask_all, request_of, running, trace_of
from specray.bench.core.turns import in_turns
from specray.bench.proposals import WrittenOutput, read_proposals, written
from specray.config import Config
from specray.errors import ConfigError
from specray.planning.fit import fit_acceptance, fit_draft, fit_router, fit_target
from specray.planning.profile import MeasuredOutput, Profile
from specray.planning.samples import Samples, Sweep, read_hits, read_samples
from specray.requests import SpeculationParams
from specray.router import Router
from specray.router.trace import TraceEvent
from specray.rpc.connection import GrpcDrafter
from specray.serving.local.pair import CONNECT_TIMEOUT_S, WORKER_COMMAND, LocalPair, local_pair
from specray.tokenization import load_tokenizer
from specray.types import Overlap

SERIAL_KS = (0, 1, 3, 6, 12)
OVERLAPPED_KS = (2, 4)
NUM_SEQUENCES = (1, 2, 4, 8, 16, 32)
PREFILL_LENS = (32, 64, 128, 256, 512, 1024)
LONG_CONTEXTS = (256, 1024)
NUM_PASSES = 3
_NUM_STEPS = 24
"""Approximate number of steps per load; a round commits more than one token."""
_SHORT_PROMPT = 32
"""Prompt tokens of loads that time steps; short, so that prefill takes no time."""
_ACCEPTANCE_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class SweepPlan:
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    num_sequences: tuple[int, ...] = NUM_SEQUENCES
    ks: tuple[int, ...] = SERIAL_KS
    has_overlap: bool = False
    """True if draft-ahead outcomes are measured, too, and both engines at work at once."""
    step_temperature: float = 0.0
    """Temperature at which steps are timed; sampling takes time of its own."""
    num_acceptance_tokens: int = 128
    """Output tokens per prompt on which acceptance is measured."""
    num_passes: int = NUM_PASSES
    """Passes over all loads but acceptance; the median of each size counts."""
    dataset: str = "builtin"


async def measure_profile(
    config: Config,
    prompts: Sequence[str],
    plan: SweepPlan,
    *,
    name: str = "",
    in_turn: Callable[[LocalPair], Awaitable[None]] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> Profile:
    """Starts the pair without Ray and measures it.

    Args:
        config: configuration of the pair; the sweep chooses how it speculates.
        prompts: prompts on which acceptance is measured, and with which contexts are filled.
        in_turn: measures something else on the pair after each pass, so that both see the same state of the
            machine.
        progress: called with the name of the next part.

    Raises like ``local_pair``.
    """
    if config.draft.enabled and (not config.draft.has_model or config.draft.reads_features):
        raise ConfigError(f"draft.model is {config.draft.model!r}; allowed here: a model, or no draft")
    tokenizer = load_tokenizer(config.target.model)
    token_ids = [tuple(tokenizer.encode(prompt)) for prompt in prompts]
    progress("starting the pair")
    async with local_pair(without_cache(config), worker_command=worker_command) as pair:
        target_info, draft_info = await pair.infos()
        loads = _Loads(config, pair, token_ids, target_info.max_model_len, plan.step_temperature, progress)
        sweep = await _measure_acceptance(loads, plan)
        parts: list[Callable[[], Awaitable[None]]] = [
            partial(_measure_pass, loads, plan, sweep),
            *([partial(in_turn, pair)] if in_turn else []),
        ]
        for _, _, measure in in_turns(parts, plan.num_passes):
            await measure()
    draft = (
        fit_draft(sweep, draft_info, hardware=hardware_name(config.draft)) if draft_info is not None else None
    )
    return Profile(
        name=name,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        specray_version=__version__,
        dataset=plan.dataset,
        target=fit_target(sweep, target_info, hardware=hardware_name(config.target)),
        draft=draft,
        router=fit_router(sweep),
        acceptance=fit_acceptance(sweep) if draft is not None else (),
    )


async def _measure_acceptance(loads: _Loads, plan: SweepPlan) -> Sweep:
    """Begins the sweep; this also warms up caches, threads and kernels for new sizes."""
    sweep = Sweep()
    await loads.rounds(Overlap.SERIAL, max(_ks(loads, plan)), _counts(loads, plan)[:3])
    if not loads.has_draft:
        return sweep
    for temperature in plan.temperatures:
        events, outputs = await loads.acceptance(Overlap.SERIAL, temperature, plan.num_acceptance_tokens)
        sweep.acceptance[temperature] = read_samples(events)
        sweep.outputs[temperature] = await loads.proposals(outputs)
        if plan.has_overlap:
            events, _ = await loads.acceptance(
                Overlap.ENUMERATE, temperature, plan.num_acceptance_tokens, k=OVERLAPPED_KS[-1]
            )
            sweep.hits[temperature] = read_hits(events)
    return sweep


async def _measure_pass(loads: _Loads, plan: SweepPlan, sweep: Sweep) -> None:
    rounds, counts = Samples(), _counts(loads, plan)
    for k in _ks(loads, plan):
        # Largest number of draft tokens in a step: with many sequences a router does not choose a large K.
        fitting = [count for count in counts if count * k <= 200]
        rounds.extend(read_samples(await loads.rounds(Overlap.SERIAL, k, fitting)))
    sweep.rounds.append(rounds)
    sweep.plain_prefills.extend(read_samples(await loads.prefills(k=0)))
    if loads.has_draft:
        sweep.prefills.extend(read_samples(await loads.prefills(k=1)))
    for k, length in itertools.product((0, 3) if loads.has_draft else (0,), LONG_CONTEXTS):
        samples = read_samples(await loads.long_context(length, k=k))
        sweep.long_context.setdefault((k, length), Samples()).extend(samples)
    if plan.has_overlap and loads.has_draft:
        for k in OVERLAPPED_KS:
            sweep.overlapped.extend(read_samples(await loads.rounds(Overlap.ENUMERATE, k, counts)))


def _ks(loads: _Loads, plan: SweepPlan) -> list[int]:
    return [k for k in plan.ks if k == 0 or loads.has_draft]


def _counts(loads: _Loads, plan: SweepPlan) -> list[int]:
    limit = loads.max_num_seqs
    return [count for count in plan.num_sequences if count <= limit] or [limit]


class _Loads:
    """Short loads on one pair. Each has a router of its own and returns its trace."""

    def __init__(
        self,
        config: Config,
        pair: LocalPair,
        prompts: Sequence[tuple[int, ...]],
        max_model_len: int,
        step_temperature: float,
        progress: Callable[[str], None],
    ) -> None:
        self._step_temperature = step_temperature
        self._config = config
        self._max_model_len = max_model_len
        self._pair = pair
        self._prompts = prompts
        self._text = tuple(itertools.chain.from_iterable(prompts))
        self._progress = progress
        self._names = itertools.count()
        self._offsets = itertools.count()

    @property
    def has_draft(self) -> bool:
        return self._pair.draft is not None

    @property
    def max_num_seqs(self) -> int:
        config = self._config
        return min(config.target.max_num_seqs, config.draft.max_num_seqs if self.has_draft else 4096)

    async def rounds(self, overlap: Overlap, k: int, counts: Sequence[int]) -> list[TraceEvent]:
        """Runs ``count`` sessions at once with K draft tokens, for each count."""
        max_tokens = _NUM_STEPS * (1 if k == 0 else 2 if k < 6 else 3)
        async with self._serving(overlap) as serving:
            for count in counts:
                self._progress(f"{overlap}, K = {k}, {count} at once")
                # Repetitions of a load with few sequences, which has few samples per step.
                for _ in range(3 if count < 4 else 1):
                    prompts = itertools.islice(itertools.cycle(self._prompts), count)
                    short = [prompt[:_SHORT_PROMPT] for prompt in prompts]
                    await serving.serve(short, max_tokens=max_tokens, k=k, temperature=self._step_temperature)
            return await serving.events()

    async def prefills(self, *, k: int) -> list[TraceEvent]:
        """Runs prompts of many lengths, one at a time; with K > 0 the draft reads them too.

        No length comes twice: a step of a new size takes longer, and prompts in service have all sizes.
        """
        self._progress(f"prompts, K = {k}")
        longest = min(PREFILL_LENS[-1], self._max_model_len - 8)
        lengths = [*(one for one in PREFILL_LENS if one < longest), longest]
        async with self._serving(Overlap.SERIAL) as serving:
            for _ in range(2):
                shorter = next(self._offsets)
                for length in lengths:
                    prompt = self._prompt_of(max(1, length - shorter))
                    await serving.serve([prompt], max_tokens=2, k=k, temperature=self._step_temperature)
            return await serving.events()

    async def long_context(self, wanted: int, *, k: int) -> list[TraceEvent]:
        """Runs a few sessions with ``wanted`` tokens before the measured ones, as far as they fit."""
        self._progress(f"contexts of {wanted}, K = {k}")
        max_tokens = 2 * _NUM_STEPS
        length = max(1, min(wanted, self._max_model_len - max_tokens - 8))
        prompts = [self._prompt_of(length)] * min(4, self.max_num_seqs)
        async with self._serving(Overlap.SERIAL) as serving:
            await serving.serve(prompts, max_tokens=max_tokens, k=k, temperature=self._step_temperature)
            return await serving.events()

    async def acceptance(
        self, overlap: Overlap, temperature: float, max_tokens: int, *, k: int = 8
    ) -> tuple[list[TraceEvent], list[WrittenOutput]]:
        """Runs all prompts, a few at a time; returns the traces and the outputs."""
        self._progress(f"acceptance at temperature {temperature:g}, {overlap}")
        outputs: list[WrittenOutput] = []
        async with self._serving(overlap) as serving:
            for start in range(0, len(self._prompts), _ACCEPTANCE_SEQUENCES):
                batch = self._prompts[start : start + _ACCEPTANCE_SEQUENCES]
                outputs += await serving.serve(
                    batch, max_tokens=max_tokens, k=k, temperature=temperature, first_seed=start
                )
            return await serving.events(), outputs

    async def proposals(self, outputs: Sequence[WrittenOutput]) -> list[MeasuredOutput]:
        """Asks the draft what it would have proposed at each place of the outputs."""
        self._progress("proposals at each place of the outputs")
        assert self._pair.draft is not None, "there is a draft"
        drafter = await GrpcDrafter.connect(self._pair.draft, timeout_s=CONNECT_TIMEOUT_S)
        try:
            return await read_proposals(drafter, outputs)
        finally:
            await drafter.close()

    def _prompt_of(self, length: int) -> tuple[int, ...]:
        return tuple(itertools.islice(itertools.cycle(self._text), length))

    @asynccontextmanager
    async def _serving(self, overlap: Overlap) -> AsyncIterator[_Serving]:
        speculation = {"overlap": overlap.value, "fallback": "none"}
        traced: Changes = {"speculation": speculation, "router": {"trace_events": MAX_TRACE_EVENTS}}
        async with running(self._pair, changed(self._config, traced)) as router:
            yield _Serving(router, self._names)


class _Serving:
    def __init__(self, router: Router, names: Iterator[int]) -> None:
        self._router = router
        self._names = names

    async def serve(
        self,
        prompts: Sequence[tuple[int, ...]],
        *,
        max_tokens: int,
        k: int,
        temperature: float = 0.0,
        first_seed: int = 0,
    ) -> list[WrittenOutput]:
        """Runs all prompts at once, each to ``max_tokens`` or its end, each with a seed of its own."""
        speculation = SpeculationParams(enabled=k > 0, num_speculative_tokens=k)
        requests = [
            request_of(
                f"profile-{next(self._names)}",
                prompt,
                max_tokens,
                temperature=temperature,
                seed=seed,
                speculation=speculation,
            )
            for seed, prompt in enumerate(prompts, first_seed)
        ]
        return written(requests, await ask_all(self._router, requests))

    async def events(self) -> list[TraceEvent]:
        """Returns all trace events since the start."""
        return await trace_of(self._router)
