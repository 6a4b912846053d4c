"""Measures candidates on one target: likeness along its outputs, and both engines' step times in service.

Likeness comes from ``bench/methods/along``: the target writes each output alone, and every candidate is led
along it with each K. What drafts in the target's steps is served instead, and so is rejection sampling. Step
times come from short loads through real routers, in turns, read from their traces.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specray.bench.advise.advice import Measured
from specray.bench.advise.candidate import Candidate, on_targets, processes_of, without_draft
from specray.bench.advise.figures import Likeness, ProposeTime, Times, VerifyTime
from specray.bench.core.arm import changed
from specray.bench.core.figures import Tally
from specray.bench.core.service import MAX_TRACE_EVENTS, ask_all, request_of, running, trace_of
from specray.bench.core.turns import in_turns
from specray.bench.methods.along import walk_along
from specray.bench.methods.method import ALL, IN_TARGET, PLAIN, Method
from specray.bench.methods.prompts import LabelledPrompt
from specray.bench.methods.run import written_outputs
from specray.bench.proposals import WrittenOutput
from specray.config import Config
from specray.engine_info import RoutedExperts, StepTime
from specray.planning.samples import Samples, read_samples
from specray.requests import GenerateRequest, SpeculationParams
from specray.serving.local.pair import LocalPair, PeerDrafterSource, local_pair
from specray.types import DraftKind, Verification

_SHORT_PROMPT = 32
"""Prompt tokens of those loads; short, so that prefill takes no time."""
_NUM_STEPS = 24
"""Approximate target steps of such a load; a round commits more than one token."""
_SIDE_BY_SIDE = 8
"""Requests at a time where a draft is served to see what is accepted."""

Show = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    prompts: tuple[LabelledPrompt, ...]
    """Prompts, each with its domain as category."""
    temperatures: tuple[float, ...]
    ks: tuple[int, ...]
    """Numbers of draft tokens per round to compare, ascending."""
    concurrencies: tuple[int, ...]
    """Sequences at a time for which steps are timed, ascending."""
    max_tokens: int
    """Output tokens per prompt."""
    num_passes: int
    """Passes over the loads that time steps."""
    max_seconds: float
    """Seconds of those loads, over which no further one begins; the first of each candidate always does."""


@dataclass(slots=True)
class _Clock:
    show: Show
    num_all: int
    num_done: int = 0
    loads_s: float = 0.0

    def begin(self, text: str) -> None:
        self.show(text, self.num_done, self.num_all)
        self.num_done += 1


@dataclass(slots=True)
class _Found:
    """What loads have shown so far of one draft, or of none."""

    verify: list[VerifyTime] = field(default_factory=list)
    propose: list[ProposeTime] = field(default_factory=list)
    draft_steps: tuple[StepTime, ...] = ()


async def measure(
    target: Config,
    candidates: Sequence[Candidate],
    plan: MeasurePlan,
    show: Show,
) -> tuple[list[Measured], Times, int]:
    """Starts the engines without Ray, and measures.

    Args:
        target: configuration of the target; its draft is of no account.
        candidates: with this target; a drafter on the target has a target process of its own.

    Returns:
        The candidates in their order, the step times of plain decoding, and most sequences of the target.

    Raises like ``local_pair``, and SpecrayError for a request that failed.
    """
    alone = [one for one in candidates if one.kind is not DraftKind.FEATURES]
    clock = _Clock(show, _num_parts(candidates, plan))
    clock.begin("starting the engines")
    base = _Bench(without_draft(target), alone, plan, clock, has_plain=True)
    await base.run()
    found = {one.candidate.name: one for one in base.measured()}
    for config, group in on_targets(candidates):
        bench = _Bench(config, group, plan, clock, has_plain=False)
        await bench.run()
        found |= {one.candidate.name: one for one in bench.measured()}
    return [found[one.name] for one in candidates], base.plain_times(), base.most_sequences


def _num_parts(candidates: Sequence[Candidate], plan: MeasurePlan) -> int:
    num_targets = 1 + len(on_targets(candidates))
    num_sources = len({one.timed_as for one in candidates})
    num_loads = plan.num_passes * len(plan.concurrencies) * (num_sources + 1)
    return 1 + len(plan.temperatures) * (num_targets + len(candidates)) + num_loads


class _Bench:
    def __init__(
        self,
        config: Config,
        candidates: Sequence[Candidate],
        plan: MeasurePlan,
        clock: _Clock,
        *,
        has_plain: bool,
    ) -> None:
        """``has_plain``: steps of plain decoding are timed, too."""
        self._config, self._candidates, self._plan, self._clock = config, candidates, plan, clock
        self._has_plain = has_plain
        self._processes = processes_of(candidates)
        self._configs = {
            self._processes[one.timed_as]: one.config for one in candidates if one.kind is DraftKind.MODEL
        }
        self._likenesses: dict[str, list[Likeness]] = {one.name: [] for one in candidates}
        self._rejection: dict[str, list[Likeness]] = {one.name: [] for one in candidates}
        self._found: dict[str, _Found] = {one.timed_as: _Found() for one in candidates}
        self._names = itertools.count()
        self.plain = _Found()
        self._target_steps: tuple[StepTime, ...] = ()
        self._context_token_s = 0.0
        self._experts: RoutedExperts | None = None
        self.most_sequences = config.target.max_num_seqs

    def measured(self) -> list[Measured]:
        """What was measured of each candidate."""
        return [
            Measured(
                one,
                tuple(self._likenesses[one.name]),
                tuple(self._rejection[one.name]),
                self._times(one),
            )
            for one in self._candidates
        ]

    def plain_times(self) -> Times:
        """Steps of the target with no draft, and with drafts that do not work in them: they are alike."""
        return self._times(None)

    def _times(self, one: Candidate | None) -> Times:
        beside = [self._found[each.timed_as] for each in self._candidates if each.kind not in IN_TARGET]
        own = _Found() if one is None else self._found[one.timed_as]
        sources = [own] if one is not None and one.kind in IN_TARGET else [self.plain, *beside]
        # Trees share the steps of their chains.
        steps = {id(found): found.verify for found in sources}
        return Times(
            max(step.num_sequences for verify in steps.values() for step in verify),
            self._target_steps,
            self._context_token_s,
            self._experts,
            own.draft_steps,
            tuple(itertools.chain.from_iterable(steps.values())),
            tuple(own.propose),
        )

    async def run(self) -> None:
        """Measures everything."""
        async with local_pair(self._config, other_drafts=self._configs) as pair:
            info, _ = await pair.infos()
            self._target_steps, self._context_token_s = tuple(info.step_times), info.context_token_s
            self._experts = info.experts
            # The first steps choose kernels and touch memory.
            await self._load(pair, None, 0, 1)
            for temperature in self._plan.temperatures:
                await self._likeness(pair, temperature)
            await self._step_times(pair)

    # Likeness

    async def _likeness(self, pair: LocalPair, temperature: float) -> None:
        plan = self._plan
        self._clock.begin(f"temperature {temperature:g}, the target alone")
        is_led = any(one.kind not in IN_TARGET for one in self._candidates)
        outputs = (
            await written_outputs(self._config, pair, plan.prompts, temperature, plan.max_tokens)
            if is_led
            else []
        )
        for one in self._candidates:
            self._clock.begin(f"temperature {temperature:g}, {one.name}")
            for k in one.fitting(plan.ks):
                tallies = await self._tallies(pair, one, outputs, temperature, k)
                self._likenesses[one.name] += self._by_domain(temperature, k, tallies)
            if one.kind is DraftKind.MODEL and one.tree == "off" and temperature > 0:
                k = plan.ks[-1]
                tallies = await self._served(pair, one, temperature, k, Verification.REJECTION)
                self._rejection[one.name] += self._by_domain(temperature, k, tallies)[:1]

    async def _tallies(
        self,
        pair: LocalPair,
        one: Candidate,
        outputs: Sequence[WrittenOutput],
        temperature: float,
        k: int,
    ) -> list[Tally]:
        if one.kind in IN_TARGET:
            return await self._served(pair, one, temperature, k, Verification.COUPLED)
        method = one.method(self._process(one))
        if one.kind is not DraftKind.MODEL:
            return await walk_along(None, method, outputs, k)
        drafter = await PeerDrafterSource(pair.other_drafts[method.process]).lease()
        try:
            self._found[one.timed_as].draft_steps = tuple(drafter.info.step_times)
            return await walk_along(drafter, method, outputs, k)
        finally:
            await drafter.close()

    async def _served(
        self, pair: LocalPair, one: Candidate, temperature: float, k: int, verification: Verification
    ) -> list[Tally]:
        tallies: list[Tally] = []
        prompts, method = self._plan.prompts, one.method(self._process(one))
        requests = [
            self._request(
                prompt.token_ids, one.kind, k, self._plan.max_tokens, temperature, seed, verification
            )
            for seed, prompt in enumerate(prompts)
        ]
        async with running(pair.with_draft(method.process), method.config(self._config)) as router:
            for start in range(0, len(requests), _SIDE_BY_SIDE):
                outputs = await ask_all(router, requests[start : start + _SIDE_BY_SIDE])
                tallies += [Tally.of(output, is_equal=True) for output in outputs]
        return tallies

    def _by_domain(self, temperature: float, k: int, tallies: Sequence[Tally]) -> list[Likeness]:
        labels = [prompt.category for prompt in self._plan.prompts]
        domains = list(dict.fromkeys(label for label in labels if label))
        found = []
        for domain in (ALL, *(domains if len(domains) > 1 else [])):
            own = [one for one, label in zip(tallies, labels, strict=True) if domain in (ALL, label)]
            found.append(Likeness.of(temperature, domain, k, Tally.merged(own)))
        return found

    # Step times

    async def _step_times(self, pair: LocalPair) -> None:
        """All loads in turns: what else the machine does is in all of them."""
        plan = self._plan
        chains = {one.timed_as: one for one in self._candidates}
        sources = [*([None] if self._has_plain else []), *chains.values()]
        for _, place, one in in_turns(sources, plan.num_passes, num_places=len(plan.concurrencies)):
            count = plan.concurrencies[place]
            name = PLAIN if one is None else one.timed_as
            self._clock.begin(f"step times, {count} at a time, {name}")
            found = self.plain if one is None else self._found[name]
            if found.verify and self._clock.loads_s > plan.max_seconds:
                continue
            # K of the loads that time steps, as far as K goes.
            ks = [k for k in (1, 3, 7) if k <= plan.ks[-1]] or [plan.ks[-1]]
            started_s = time.monotonic()
            for k in [0] if one is None else ks:
                _add(found, await self._load(pair, one, k, count))
            self._clock.loads_s += time.monotonic() - started_s

    async def _load(self, pair: LocalPair, one: Candidate | None, k: int, count: int) -> Samples:
        if one is None:
            method = Method.parse(PLAIN)
        else:
            tree = one.tree if one.timed_as == one.name else "off"
            method = Method(one.timed_as, one.kind, tree, self._process(one))
        traced = changed(method.config(self._config), {"router": {"trace_events": MAX_TRACE_EVENTS}})
        max_tokens = min(self._plan.max_tokens, _NUM_STEPS * (1 if k == 0 else 2 if k < 6 else 3))
        prompts = itertools.islice(itertools.cycle(self._plan.prompts), count)
        async with running(pair.with_draft(method.process), traced) as router:
            await ask_all(
                router,
                (
                    self._request(
                        prompt.token_ids[:_SHORT_PROMPT],
                        method.draft,
                        k,
                        max_tokens,
                        self._plan.temperatures[0],
                        seed,
                    )
                    for seed, prompt in enumerate(prompts)
                ),
            )
            return read_samples(await trace_of(router))

    def _request(
        self,
        prompt: tuple[int, ...],
        kind: DraftKind | None,
        k: int,
        max_tokens: int,
        temperature: float,
        seed: int,
        verification: Verification = Verification.COUPLED,
    ) -> GenerateRequest:
        return request_of(
            f"advise-{next(self._names)}",
            prompt,
            max_tokens,
            temperature=temperature,
            seed=seed,
            speculation=SpeculationParams(enabled=k > 0, num_speculative_tokens=k, draft=kind),
            verification=verification,
        )

    def _process(self, one: Candidate) -> str:
        return self._processes.get(one.timed_as, "")


def _add(found: _Found, samples: Samples) -> None:
    """Takes the steps of a load that read no prompt."""
    found.verify += [
        VerifyTime(
            step.sent_s,
            step.num_sequences,
            step.num_rows,
            step.num_context_tokens + step.num_rows,
            step.forward_s + step.transport_s,
            step.num_experts,
        )
        for step in samples.target
        if step.num_prefill_rows == 0
    ]
    found.propose += [
        ProposeTime(
            step.replied_s,
            step.num_sequences,
            step.num_tokens,
            step.num_new_tokens,
            step.forward_s,
            step.transport_s,
        )
        for step in samples.draft
        if not step.is_prefill and not step.is_mixed and step.num_branches == 0
    ]
