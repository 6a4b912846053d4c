"""Asks a running service for the same outputs in several ways, and says which differ by more than chance.

Greedy and coupled outputs must be those of plain decoding, token by token. Where the width of a forward
changes last bits, plain decoding is compared with itself at another batch, too: a way that parts no more
often than that is right. Outputs under rejection depend on the draft; there each token must be a draw from
the distribution that plain decoding has at its place.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from specray.bench.load.client import ServerClient
from specray.bench.plans import VerifyPlan
from specray.bench.verify.calibration import Calibration, calibrate
from specray.bench.verify.outputs import (
    Agreement,
    NotOfferedError,
    VerifiedOutput,
    agreement,
    ask_outputs,
)
from specray.bench.verify.plan import CASES, PLAIN, TASK_WAYS, WAYS, VerifyCase, VerifyWay
from specray.bench.verify.samples import sampled_outputs
from specray.bench.verify.tasks import Task
from specray.environment import api_key
from specray.errors import ConfigError, SpecrayError

SIGNIFICANCE = 1e-3
"""Probability at which chance is no explanation any more, over all comparisons of a run together."""


@dataclass(frozen=True, slots=True)
class Comparison:
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
    model: str
    plan: VerifyPlan
    is_deterministic: bool = False
    """Whether the service says that outputs have the same bits in any batch, with and without drafts."""
    prompts: Sequence[str] = ()
    tasks: Sequence[Task] = ()
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def faults(self) -> list[Comparison]:
        """Comparisons that chance does not explain."""
        num_tests = max(1, sum(not one.not_offered for one in self.comparisons))
        return [one for one in self.comparisons if self._is_fault(one, SIGNIFICANCE / num_tests)]

    def _is_fault(self, one: Comparison, limit: float) -> bool:
        if one.not_offered:
            return False
        found = one.agreement
        if (
            self.plan.exact
            and found is not None
            and (found.num_diverged or (self.is_deterministic and found.max_logprob_distance > 0))
        ):
            return True
        return one.p_value < limit


async def verify(
    plan: VerifyPlan,
    prompts: Sequence[str],
    tasks: Sequence[Task],
    on_progress: Callable[[str, int, int], None],
) -> VerifyResult:
    """Runs the plan.

    Args:
        tasks: to solve with and without drafts; empty: none.
        on_progress: called with what is asked for, comparisons done and comparisons in all.

    Raises:
        EngineLostError: there is no server. InvalidRequestError: it refuses plain decoding or scores.
        ConfigError: a case or way of the plan has a name that none has. SpecrayError: it failed.
    """
    cases = _named("case", plan.case, CASES)
    # How often plain decoding parts from itself is what the others are compared with.
    ways = (WAYS[0], *(way for way in _named("way", plan.way, WAYS) if way is not WAYS[0]))
    num_all = len(cases) * len(ways) + len(ways) * bool(plan.num_samples) + len(TASK_WAYS) * bool(tasks)
    async with ServerClient(plan.url, timeout_s=plan.timeout_s, key=api_key(), model=plan.model) as client:
        is_deterministic = await client.is_deterministic()
        result = VerifyResult(plan.model or await client.model(), plan, is_deterministic, prompts, tasks)

        async def compare(case: str, way: VerifyWay, compared: Awaitable[Comparison]) -> None:
            on_progress(f"{case}: {way.name}", len(result.comparisons), num_all)
            try:
                result.comparisons.append(await compared)
            except NotOfferedError as error:
                result.comparisons.append(Comparison(case, way.name, not_offered=str(error)))

        for case in cases:
            plain = await ask_outputs(client, _bodies(result, case, PLAIN), concurrency=1)
            base: list[Agreement] = []
            for way in ways:
                await compare(case.name, way, _agreement(client, result, case, way, plain, base))
        for way in ways if plan.num_samples else ():
            await compare("rejection", way, _calibration(client, result, way))
        if tasks:
            solved = await _solved(client, tasks, PLAIN, concurrency=1)
            for way in TASK_WAYS:
                await compare("tasks", way, _tasks(client, result, way, solved))
    return result


Named = TypeVar("Named", VerifyCase, VerifyWay)


def _named(kind: str, names: Sequence[str] | None, known: Sequence[Named]) -> Sequence[Named]:
    """The items with these names; all of them without names. Raises ConfigError."""
    allowed = [one.name for one in known]
    for name in names or ():
        if name not in allowed:
            raise ConfigError(f"{kind} is {name!r}; allowed: {', '.join(map(repr, allowed))}")
    return [one for one in known if not names or one.name in names]


async def _agreement(
    client: ServerClient,
    result: VerifyResult,
    case: VerifyCase,
    way: VerifyWay,
    plain: Sequence[VerifiedOutput],
    base: list[Agreement],
) -> Comparison:
    """How far outputs are plain decoding's. ``base``: its own agreement at another batch; empty at first."""
    outputs = await ask_outputs(
        client,
        _bodies(result, case, way.speculation),
        concurrency=result.plan.concurrency,
        may_be_refused=way.may_be_refused,
    )
    found = agreement(plain, outputs)
    if not base:
        base.append(found)
        return Comparison(case.name, way.name, found)
    (own,) = base
    p_value = excess_p_value(found.num_diverged, found.num_tokens, own.num_diverged, max(1, own.num_tokens))
    return Comparison(case.name, way.name, found, p_value=p_value)


async def _calibration(client: ServerClient, result: VerifyResult, way: VerifyWay) -> Comparison:
    found = calibrate(await sampled_outputs(client, result.plan, result.prompts, way))
    if not found.num_tokens:
        raise SpecrayError(f"rejection: {way.name}: the server's answers have no sampled token to score")
    return Comparison("rejection", way.name, calibration=found, p_value=found.p_value)


async def _tasks(
    client: ServerClient, result: VerifyResult, way: VerifyWay, plain: Sequence[bool]
) -> Comparison:
    solved = await _solved(client, result.tasks, way.speculation, concurrency=result.plan.concurrency)
    pairs = list(zip(plain, solved, strict=True))
    p_value = worse_p_value(pairs.count((True, False)), pairs.count((False, True)))
    return Comparison("tasks", way.name, num_solved=(sum(plain), sum(solved), len(pairs)), p_value=p_value)


async def _solved(
    client: ServerClient, tasks: Sequence[Task], speculation: dict[str, Any], *, concurrency: int
) -> list[bool]:
    bodies = [
        {
            "prompt": task.prompt,
            "max_tokens": 384,
            "temperature": 0,
            "stop": list(task.stops),
            "return_token_ids": True,
            "speculation": speculation,
        }
        for task in tasks
    ]
    outputs = await ask_outputs(client, bodies, concurrency=concurrency)
    pairs = zip(tasks, outputs, strict=True)
    return [await task.is_solved(output.text) for task, output in pairs]


def _bodies(result: VerifyResult, case: VerifyCase, speculation: dict[str, Any]) -> list[dict[str, Any]]:
    plan = result.plan
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
        for index, prompt in enumerate(result.prompts)
    ]


def excess_p_value(num_events: int, exposure: int, base_events: int, base_exposure: int) -> float:
    """Chance of so many events or more where both arms have one rate of events per token.

    Given the events of both arms together, each is one of the first arm's with its share of the tokens.

    Args:
        num_events, base_events: divergences of the arm, and of the one that it is compared with.
        exposure, base_exposure: tokens up to and with the divergences; at least one.
    """
    share = exposure / (exposure + base_exposure)
    total = num_events + base_events
    return sum(
        math.comb(total, count) * share**count * (1 - share) ** (total - count)
        for count in range(num_events, total + 1)
    )


def worse_p_value(num_lost: int, num_won: int) -> float:
    """Chance that of the tasks which one of two arms solved so many or more were lost, where both are alike.

    McNemar's test, exact and one-sided.

    Args:
        num_lost: tasks that only plain decoding solved.
        num_won: tasks that only the other arm solved.
    """
    total = num_lost + num_won
    return float(sum(math.comb(total, count) for count in range(num_lost, total + 1)) / 2**total)
