"""Asks a running server for JSON by many schemas, with speculation off and on, and judges the answers.

The arms take turns by blocks of schemas. Every arm has a part of the prefix cache of its own, so that all of
them compute the same prompts.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from specray.bench.core.samples import by_label, difference, parse_samples
from specray.bench.core.turns import in_turns
from specray.bench.load.client import ServerClient
from specray.bench.plans import StructuredPlan
from specray.bench.structured.schemas import SchemaCase
from specray.environment import api_key
from specray.errors import EngineLostError, InvalidRequestError, SpecrayError

OFF: Final = "off"
SPECULATIVE: Final[Mapping[str, Mapping[str, Any]]] = {
    "on": {"enabled": True},
    "n-grams": {"enabled": True, "draft": "ngram"},
}
"""Field ``speculation`` by the arm's name; under n-grams there is no draft model, but forced tokens."""
ARMS: Final = {OFF: {"enabled": False}, **SPECULATIVE}
BLOCK: Final = 20
"""Schemas of an arm before the next one has its turn."""


@dataclass(frozen=True, slots=True)
class Answer:
    case: SchemaCase
    arm: str
    temperature: float
    text: str = ""
    token_ids: tuple[int, ...] = ()
    has_ended: bool = False
    """The answer ended by itself; else it was cut by ``max_tokens``."""
    seconds: float = 0.0
    refusal: str | None = None
    """Message of a refusal; None: it was not refused."""
    failure: str | None = None
    """What else went wrong; None: nothing."""


@dataclass(slots=True)
class Group:
    arm: str
    temperature: float
    answers: list[Answer] = field(default_factory=list)
    accepted: Counter[str] = field(default_factory=Counter)
    """Accepted draft tokens by their source, as the server counts them."""


@dataclass(frozen=True, slots=True)
class StructuredResult:
    plan: StructuredPlan
    cases: Sequence[SchemaCase]
    model: str
    groups: tuple[Group, ...]
    duration_s: float


async def measure_structured(
    plan: StructuredPlan, cases: Sequence[SchemaCase], on_progress: Callable[[str, int, int], None]
) -> StructuredResult:
    """Asks for every schema in every arm and at every temperature.

    Args:
        on_progress: called with the arm, the number of answers, and how many there will be.

    Raises:
        EngineLostError: there is no server.
    """
    groups = [
        Group(arm, temperature)
        for temperature in plan.temperature or (0.0, 1.0)
        for arm in (OFF, *(plan.arm or SPECULATIVE))
    ]
    blocks = [cases[first : first + BLOCK] for first in range(0, len(cases), BLOCK)]
    num_done, started_s = 0, time.monotonic()
    async with ServerClient(plan.url, timeout_s=plan.timeout_s, key=api_key()) as client:
        model = await client.model()
        for _, place, group in in_turns(groups, 1, num_places=len(blocks), is_rotated=True):
            name = f"temperature {group.temperature:g}, {group.arm}"
            on_progress(name, num_done, len(groups) * len(cases))
            await _run_block(client, plan, group, blocks[place])
            num_done += len(blocks[place])
    return StructuredResult(plan, cases, model, tuple(groups), time.monotonic() - started_s)


async def _run_block(
    client: ServerClient, plan: StructuredPlan, group: Group, cases: Sequence[SchemaCase]
) -> None:
    before = parse_samples(await client.metrics_text())
    waiting = iter(cases)

    async def work() -> None:
        for case in waiting:
            group.answers.append(await _ask(client, plan, group, case))

    await asyncio.gather(*(work() for _ in range(plan.concurrency)))
    gained = difference(before, parse_samples(await client.metrics_text()))
    by_source = by_label(gained, "specray_spec_decode_num_accepted_tokens_by_source_total", "source")
    group.accepted.update({source: round(value) for source, value in by_source.items()})


async def _ask(client: ServerClient, plan: StructuredPlan, group: Group, case: SchemaCase) -> Answer:
    started_s = time.monotonic()
    try:
        body = await client.complete(_body(plan, group, case))
    except InvalidRequestError as error:
        return Answer(case, group.arm, group.temperature, refusal=str(error))
    except EngineLostError:
        raise
    except SpecrayError as error:
        return Answer(case, group.arm, group.temperature, failure=str(error))
    choice = body["choices"][0]
    return Answer(
        case,
        group.arm,
        group.temperature,
        text=choice["message"]["content"] or "",
        token_ids=tuple(choice["token_ids"]),
        has_ended=choice["finish_reason"] == "stop",
        seconds=time.monotonic() - started_s,
    )


def _body(plan: StructuredPlan, group: Group, case: SchemaCase) -> dict[str, Any]:
    form = {"name": case.name, "schema": case.schema, "strict": case.is_strict}
    return {
        "messages": [{"role": "user", "content": case.prompt}],
        "max_tokens": plan.max_tokens,
        "temperature": group.temperature,
        "seed": plan.seed,
        "response_format": {"type": "json_schema", "json_schema": form},
        "speculation": dict(ARMS[group.arm]),
        "return_token_ids": True,
        "cache_salt": f"{group.arm}, {group.temperature:g}",
    }
