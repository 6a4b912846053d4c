"""Asks a running service for the same outputs in several ways, and says which differ by more than chance.

Greedy and coupled outputs must be those of plain decoding, token by token. In bfloat16 the width of a forward
changes last bits, so plain decoding is compared with itself at another batch, too: a way that parts no more
often than that is right. Outputs under rejection depend on the draft; there it is the distribution of tokens
that must be plain decoding's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specray.bench.load.client import ServerClient
from specray.bench.verify.outputs import Agreement, Output, agreement, read_outputs
from specray.bench.verify.statistics import excess_p_value, homogeneity_p_value, worse_p_value
from specray.bench.verify.tasks import Task
from specray.environment import api_key
from specray.errors import InvalidRequestError

SIGNIFICANCE = 1e-3
"""Probability at which chance is no explanation any more, over all comparisons of a run together."""
PLAIN: dict[str, Any] = {"enabled": False}
SELF = "plain, other batch"
"""Name of the way that compares plain decoding with itself."""
_CHOICES_PER_CALL = 8


@dataclass(frozen=True, slots=True)
class Way:
    """One way to speculate."""

    name: str
    speculation: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to sample."""

    name: str
    sampling: dict[str, Any]


WAYS = (
    Way(SELF, PLAIN),
    Way("as the service chooses", {}),
    Way("draft model, K=4", {"draft": "model", "num_speculative_tokens": 4}),
    Way("n-grams, K=8", {"draft": "ngram", "num_speculative_tokens": 8}),
    Way("suffixes, K=8", {"draft": "suffix", "num_speculative_tokens": 8}),
    Way("drafter on the target, K=4", {"draft": "features", "num_speculative_tokens": 4}),
)
TASK_WAYS = WAYS[:2]
"""Ways in which tasks are worked on: plain decoding at another batch, and as the service chooses."""
CASES = (
    Case("greedy", {"temperature": 0}),
    Case("coupled", {"temperature": 1}),
    Case(
        "coupled, penalties and top-p",
        {
            "temperature": 0.9,
            "top_p": 0.9,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.4,
            "repetition_penalty": 1.1,
            "min_tokens": 8,
        },
    ),
)


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """What a run asks for."""

    url: str
    prompts: Sequence[str]
    max_tokens: int = 48
    concurrency: int = 4
    """Requests at a time, except those of plain decoding that all others are compared with."""
    seed: int = 0
    is_exact: bool = False
    """True: one other token is a fault. For a service in float32."""
    num_samples: int = 192
    """Samples of each prompt under rejection; 0: none."""
    num_sampled_prompts: int = 3
    num_sampled_tokens: int = 4
    tasks: Sequence[Task] = ()
    max_task_tokens: int = 384
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way under one case."""

    case: str
    way: str
    agreement: Agreement | None = None
    p_value: float = 1.0
    """Chance of what was seen, or worse, where nothing is wrong."""
    num_tests: int = 1
    """Tests of which it is the least chance."""
    not_offered: str = ""
    """Reason for which the service does not have the way; empty: it has it."""
    num_solved: tuple[int, int, int] | None = None
    """Tasks that plain decoding solved, that the way solved, and all; None: none were set."""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """All comparisons of a run."""

    model: str
    plan: VerifyPlan
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def faults(self) -> list[Comparison]:
        """Comparisons that chance does not explain."""
        num_tests = max(1, sum(one.num_tests for one in self.comparisons if not one.not_offered))
        return [one for one in self.comparisons if self._is_fault(one, SIGNIFICANCE / num_tests)]

    def _is_fault(self, one: Comparison, limit: float) -> bool:
        if one.not_offered:
            return False
        if self.plan.is_exact and one.agreement is not None and one.agreement.num_diverged:
            return True
        return one.p_value < limit


async def verify(plan: VerifyPlan, on_progress: Callable[[str, int, int], None]) -> VerifyResult:
    """Runs the plan.

    Args:
        on_progress: called with what is asked for, comparisons done and comparisons in all.

    Raises:
        EngineLostError: there is no server. SpecrayError: it failed.
    """
    num_all = len(CASES) * len(WAYS) + len(WAYS) * bool(plan.num_samples) + len(TASK_WAYS) * bool(plan.tasks)
    async with ServerClient(plan.url, timeout_s=plan.timeout_s, key=api_key()) as client:
        result = VerifyResult(await client.model(), plan)
        for case in CASES:
            await _verify_case(client, result, case, lambda name: on_progress(name, _done(result), num_all))
        if plan.num_samples:
            await _verify_samples(client, result, lambda name: on_progress(name, _done(result), num_all))
        if plan.tasks:
            await _verify_tasks(client, result, lambda name: on_progress(name, _done(result), num_all))
    return result


def _done(result: VerifyResult) -> int:
    return len(result.comparisons)


async def _verify_case(
    client: ServerClient, result: VerifyResult, case: Case, on_progress: Callable[[str], None]
) -> None:
    plan = result.plan
    on_progress(case.name)
    plain = await _outputs(client, _bodies(plan, case, PLAIN), concurrency=1)
    base: Agreement | None = None
    for way in WAYS:
        on_progress(f"{case.name}: {way.name}")
        try:
            outputs = await _outputs(
                client, _bodies(plan, case, way.speculation), concurrency=plan.concurrency
            )
        except InvalidRequestError as error:
            result.comparisons.append(Comparison(case.name, way.name, not_offered=str(error)))
            continue
        found = agreement(plain, outputs)
        if base is None:
            # Plain decoding itself: nothing to compare it with.
            base, p_value = found, 1.0
        else:
            p_value = excess_p_value(
                found.num_diverged, found.num_tokens, base.num_diverged, max(1, base.num_tokens)
            )
        result.comparisons.append(Comparison(case.name, way.name, found, p_value))


async def _verify_samples(
    client: ServerClient, result: VerifyResult, on_progress: Callable[[str], None]
) -> None:
    plan = result.plan
    prompts = plan.prompts[: plan.num_sampled_prompts]
    on_progress("rejection: plain")
    plain = [await _samples(client, plan, prompt, PLAIN, first_seed=0) for prompt in prompts]
    for way in WAYS:
        on_progress(f"rejection: {way.name}")
        asked = (
            way.speculation if way.speculation is PLAIN else {**way.speculation, "verification": "rejection"}
        )
        try:
            # Seeds of its own: with plain decoding's, coupled draws would be compared.
            others = [await _samples(client, plan, prompt, asked, first_seed=1 << 20) for prompt in prompts]
        except InvalidRequestError as error:
            result.comparisons.append(Comparison("rejection", way.name, not_offered=str(error)))
            continue
        p_values = [
            homogeneity_p_value(_tokens_at(own, place), _tokens_at(other, place))
            for own, other in zip(plain, others, strict=True)
            for place in range(plan.num_sampled_tokens)
        ]
        result.comparisons.append(
            Comparison("rejection", way.name, p_value=min(p_values), num_tests=len(p_values))
        )


async def _verify_tasks(
    client: ServerClient, result: VerifyResult, on_progress: Callable[[str], None]
) -> None:
    """Whether tasks are solved as often with drafts as without."""
    plan = result.plan
    on_progress("tasks: plain")
    plain = await _solved(client, plan, PLAIN, concurrency=1)
    for way in TASK_WAYS:
        on_progress(f"tasks: {way.name}")
        solved = await _solved(client, plan, way.speculation, concurrency=plan.concurrency)
        pairs = list(zip(plain, solved, strict=True))
        p_value = worse_p_value(pairs.count((True, False)), pairs.count((False, True)))
        counts = (sum(plain), sum(solved), len(pairs))
        result.comparisons.append(Comparison("tasks", way.name, num_solved=counts, p_value=p_value))


async def _solved(
    client: ServerClient, plan: VerifyPlan, speculation: dict[str, Any], *, concurrency: int
) -> list[bool]:
    bodies = [
        {
            "prompt": task.prompt,
            "max_tokens": plan.max_task_tokens,
            "temperature": 0,
            "stop": list(task.stops),
            "return_token_ids": True,
            "speculation": speculation,
        }
        for task in plan.tasks
    ]
    outputs = await _outputs(client, bodies, concurrency=concurrency)
    pairs = zip(plan.tasks, outputs, strict=True)
    return [await task.is_solved(output.text) for task, output in pairs]


def _tokens_at(outputs: Iterable[Output], place: int) -> list[int]:
    """The tokens of one place; -1 where an output has ended."""
    return [output.token_ids[place] if place < len(output.token_ids) else -1 for output in outputs]


async def _samples(
    client: ServerClient, plan: VerifyPlan, prompt: str, speculation: dict[str, Any], *, first_seed: int
) -> list[Output]:
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": plan.num_sampled_tokens,
            "temperature": 1,
            "seed": plan.seed + first_seed + start,
            "n": min(_CHOICES_PER_CALL, plan.num_samples - start),
            "return_token_ids": True,
            "speculation": speculation,
        }
        for start in range(0, plan.num_samples, _CHOICES_PER_CALL)
    ]
    return await _outputs(client, bodies, concurrency=plan.concurrency)


def _bodies(plan: VerifyPlan, case: Case, speculation: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": prompt,
            "max_tokens": plan.max_tokens,
            "seed": plan.seed + index,
            "logprobs": 0,
            "return_token_ids": True,
            # A service may verify by rejection unless it is told otherwise.
            "speculation": {"verification": "coupled", **speculation},
            **case.sampling,
        }
        for index, prompt in enumerate(plan.prompts)
    ]


async def _outputs(
    client: ServerClient, bodies: Sequence[dict[str, Any]], *, concurrency: int
) -> list[Output]:
    """Asks for all outputs, so many at a time; they come in the order of the bodies.

    Raises:
        InvalidRequestError: the service does not offer what they ask for. SpecrayError: it failed.
    """
    answers: dict[int, list[Output]] = {}
    waiting = iter(enumerate(bodies))

    async def work() -> None:
        for index, body in waiting:
            answers[index] = read_outputs(await client.complete(body))

    # The first call shows whether the service offers it.
    index, first = next(waiting)
    answers[index] = read_outputs(await client.complete(first))
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return [output for index in range(len(bodies)) for output in answers[index]]
