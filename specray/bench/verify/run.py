"""Asks a running service for the same outputs in several ways, and says which differ by more than chance.

Greedy and coupled outputs must be those of plain decoding, token by token. In bfloat16 the width of a forward
changes last bits, so plain decoding is compared with itself at another batch, too: a way that parts no more
often than that is right. Outputs under rejection depend on the draft; there each token must be a draw from
the distribution that plain decoding has at its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specray.bench.load.client import ServerClient
from specray.bench.verify.calibration import Calibration, calibrate
from specray.bench.verify.outputs import Agreement, NotOfferedError, agreement, ask_outputs
from specray.bench.verify.plan import CASES, PLAIN, TASK_WAYS, WAYS, Case, VerifyPlan
from specray.bench.verify.samples import sampled_outputs
from specray.bench.verify.statistics import excess_p_value, worse_p_value
from specray.environment import api_key
from specray.errors import SpecrayError

SIGNIFICANCE = 1e-3
"""Probability at which chance is no explanation any more, over all comparisons of a run together."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way under one case."""

    case: str
    way: str
    agreement: Agreement | None = None
    """How far outputs are plain decoding's; None: that is not asked."""
    calibration: Calibration | None = None
    """How far sampled tokens are as likely as they should be; None: that is not asked."""
    p_value: float = 1.0
    """Chance of what was seen, or worse, where nothing is wrong."""
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
        num_tests = max(1, sum(not one.not_offered for one in self.comparisons))
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
        EngineLostError: there is no server. InvalidRequestError: it refuses plain decoding or scores.
        SpecrayError: it failed.
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
    plain = await ask_outputs(client, _bodies(plan, case, PLAIN), concurrency=1)
    base: Agreement | None = None
    for way in WAYS:
        on_progress(f"{case.name}: {way.name}")
        try:
            outputs = await ask_outputs(
                client,
                _bodies(plan, case, way.speculation),
                concurrency=plan.concurrency,
                may_be_refused=way.may_be_refused,
            )
        except NotOfferedError as error:
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
        result.comparisons.append(Comparison(case.name, way.name, found, p_value=p_value))


async def _verify_samples(
    client: ServerClient, result: VerifyResult, on_progress: Callable[[str], None]
) -> None:
    """Whether tokens under rejection are draws from the target's own distribution."""
    plan = result.plan
    for way in WAYS:
        on_progress(f"rejection: {way.name}")
        try:
            found = calibrate(await sampled_outputs(client, plan, way))
        except NotOfferedError as error:
            result.comparisons.append(Comparison("rejection", way.name, not_offered=str(error)))
            continue
        if not found.num_tokens:
            raise SpecrayError(f"rejection: {way.name}: the server's answers have no sampled token to score")
        result.comparisons.append(Comparison("rejection", way.name, calibration=found, p_value=found.p_value))


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
    outputs = await ask_outputs(client, bodies, concurrency=concurrency)
    pairs = zip(plan.tasks, outputs, strict=True)
    return [await task.is_solved(output.text) for task, output in pairs]


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
