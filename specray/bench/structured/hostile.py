"""Grammars that ask for endless work, and what they cost whoever is served beside them."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from specray.bench.load.client import key_header
from specray.bench.load.memory import read_memory, service_pids
from specray.bench.load.raw_http import RawAnswer, RawClient
from specray.bench.plans import StructuredPlan
from specray.environment import api_key
from specray.errors import SpecrayError

Fields = dict[str, Any]
ANSWER_GOAL_S: Final = 1.0
ITL_GOAL: Final = 2.0
"""Most times the median ITL without hostile requests."""
MEMORY_GOAL_MB: Final = 50.0
_SAMPLE_S: Final = 0.25
"""Seconds between two readings of the memory."""
ORDINARY: Final = "an ordinary schema"
"""Name of the first attack, which is none: what is answered at all takes as long as this."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One hostile grammar in any number of variants, so that no cache knows it."""

    name: str
    fields: Callable[[int], Fields]
    """Fields of the request by the variant's number."""


@dataclass(frozen=True, slots=True)
class AttackResult:
    """What one attack cost, while other requests were served."""

    name: str
    num_sent: int
    statuses: tuple[int, ...]
    """Different statuses of the answers; 0: there was none."""
    slowest_s: float
    """Longest time from sending to the end of the answer."""
    quiet_itl_ms: float | None
    """Median milliseconds between events of the others just before; None: they had none."""
    itl_ms: float | None
    """The same meanwhile."""
    memory_mb: float | None
    """Growth of the service's resident memory; None: it is not on this machine."""

    @property
    def itl_ratio(self) -> float | None:
        """Times the quiet ITL; None: the others had too few events."""
        return self.itl_ms / self.quiet_itl_ms if self.itl_ms and self.quiet_itl_ms else None


@dataclass(frozen=True, slots=True)
class HostileResult:
    num_others: int
    attacks: tuple[AttackResult, ...]
    num_failed_others: int
    memory_mb: float | None
    """Growth over all attacks."""

    @property
    def shortfalls(self) -> tuple[str, ...]:
        """What falls short of the goals."""
        found, ordinary = list[str](), self.attacks[0]
        for each in self.attacks:
            own_s = each.slowest_s - (ordinary.slowest_s if 200 in each.statuses else 0.0)
            if own_s > ANSWER_GOAL_S:
                found.append(f"{each.name}: {own_s:.2f} s; the goal is {ANSWER_GOAL_S:g} s")
            if any(status not in (200, 400) for status in each.statuses):
                found.append(f"{each.name}: statuses {each.statuses}; the goal is 200 or 400")
            if each.itl_ratio is not None and each.itl_ratio > ITL_GOAL:
                found.append(f"{each.name}: {each.itl_ratio:.1f} times the quiet ITL")
            if each.memory_mb is not None and each.memory_mb > MEMORY_GOAL_MB:
                found.append(f"{each.name}: {each.memory_mb:.0f} MB; the goal is {MEMORY_GOAL_MB:g} MB")
        if self.num_failed_others:
            found.append(f"{self.num_failed_others} ordinary requests failed")
        return tuple(found)


def attacks() -> list[Attack]:
    """Returns an ordinary schema, the attacks of the literature, and ways around single limits."""
    return [
        Attack(ORDINARY, lambda n: _json({"type": "object", "properties": {f"p{n}": {"type": "string"}}})),
        Attack(
            "regex with nested counts", lambda n: {"guided_regex": f"({_letter(n)}{{1,1000}}){{1,{999 - n}}}"}
        ),
        Attack(
            "regex that repeats itself", lambda n: {"guided_regex": f"(([a-{_letter(n)}]+)+)+x{{{n + 1},}}"}
        ),
        Attack("regex of many tails", lambda n: {"guided_regex": f"(.*a.{{{100 + n}}}|.*b.{{{101 + n}}})"}),
        Attack(
            "regex of many letters",
            lambda n: {"guided_regex": rf"[\p{{L}}\p{{N}}]{{1,{2000 + n}}}[\p{{Lu}}]"},
        ),
        Attack("EBNF with nested counts", lambda n: {"guided_grammar": _ebnf(n)}),
        Attack("Lark with nested counts", lambda n: {"guided_grammar": _lark(n)}),
        Attack("anyOf, 300 deep", lambda n: _json(_deep('{"anyOf":[', ',{"type":"string"}]}', 300 - n % 50))),
        Attack("arrays, 2000 deep", lambda n: _json(_deep('{"type":"array","items":', "}", 2000 - n))),
        Attack("arrays, 100 deep", lambda n: _json(_deep('{"type":"array","items":', "}", 100 - n % 30))),
        Attack("16 patterns in allOf", lambda n: _json({"allOf": [_tail(each, n) for each in range(16)]})),
        Attack("oneOf of three, 8 deep", lambda n: _json(_wide(8, n))),
        Attack("oneOf of three by reference, 8 deep", lambda n: _json(_chain(n))),
        Attack("5000 properties", lambda n: _json(_properties(5000 + n, is_required=True))),
        Attack("900 required properties", lambda n: _json(_properties(900 - n, is_required=True))),
        Attack("500 optional properties", lambda n: _json(_properties(500 - n, is_required=False))),
        Attack("enum of 5000", lambda n: _json({"enum": [f"entry {n} {each}" for each in range(5000 - n)]})),
        Attack("long string with a pattern", lambda n: _json(_long(n))),
        Attack("unbounded recursion", lambda n: _json(_recursion(n))),
    ]


def _letter(number: int) -> str:
    return chr(ord("b") + number % 24)


def _json(schema: object) -> Fields:
    return {"guided_json": schema}


def _deep(opening: str, close: str, depth: int) -> str:
    """A schema that is nested so deep, as text: what writes JSON has limits of its own."""
    return opening * depth + '{"type":"integer"}' + close * depth


def _wide(depth: int, number: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = _one_of(schema, number)
    return schema


def _one_of(inner: Any, number: int) -> Any:
    return {"oneOf": [_with_key(f"{name}{number}", inner) for name in "abc"]}


def _with_key(key: str, inner: Any) -> Any:
    return {"type": "object", "properties": {key: inner}, "required": [key]}


def _chain(number: int) -> Any:
    """A schema as wide as one of ``_one_of``, and short: each level refers to the next."""
    levels = {f"level{depth}": _one_of({"$ref": f"#/$defs/level{depth + 1}"}, number) for depth in range(8)}
    return {"$defs": {**levels, "level8": {"type": "integer"}}, "$ref": "#/$defs/level0"}


def _tail(each: int, number: int) -> Any:
    return {"type": "string", "pattern": f"^.*{chr(97 + each)}.{{{each + number},}}$"}


def _properties(count: int, *, is_required: bool) -> Any:
    properties = {f"p{each}": {"type": "string"} for each in range(count)}
    return {"type": "object", "properties": properties, "required": list(properties) if is_required else []}


def _long(number: int) -> Any:
    return {"type": "string", "pattern": "^([a-z]+[0-9]+)*$", "maxLength": 5000 + number}


def _recursion(number: int) -> Any:
    tree = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/tree"}, {"const": number}]}}
    return {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"}


def _ebnf(number: int) -> str:
    return f'root ::= ((("{_letter(number)}"{{1,100}}){{1,100}}){{1,{100 - number % 50}}}){{1,100}}'


def _lark(number: int) -> str:
    return f'start: a{{1,1000}}\na: b{{1,{1000 - number}}}\nb: "x"{{1,1000}}'


async def measure_hostile(
    plan: StructuredPlan, prompts: Sequence[str], on_progress: Callable[[str, int, int], None]
) -> HostileResult:
    """Runs all attacks, each for a while and one request at a time, next to ordinary requests.

    Args:
        prompts: of the ordinary requests.
        on_progress: called with the attack, how many are done, and how many there are.

    Raises:
        EngineLostError: there is no server.
        SpecrayError: the ordinary requests get no answers.
    """
    client = RawClient(plan.url, "/v1/completions", headers=key_header(api_key()), timeout_s=plan.timeout_s)
    pids = service_pids(urlsplit(plan.url).port or 80)
    planned = [one for one in attacks() if not plan.attack or one.name in (ORDINARY, *plan.attack)]
    measured = []
    async with _others(client, prompts, plan.num_others) as others:
        # The first grammar makes what all others share, which is no growth.
        await client.post(_body({"guided_json": {"type": "object"}}))
        before_mb = _memory_mb(pids)
        for place, attack in enumerate(planned):
            on_progress(attack.name, place, len(planned))
            measured.append(await _attack(client, attack, plan, pids))
        after_mb = _memory_mb(pids)
    client.close()
    results = [each.result(attack, others) for attack, each in zip(planned, measured, strict=True)]
    if all(each.quiet_itl_ms is None for each in results):
        raise SpecrayError(f"no ordinary request was answered: {others.first_error or 'they are too slow'}")
    growth = None if before_mb is None or after_mb is None else after_mb - before_mb
    return HostileResult(plan.num_others, tuple(results), others.num_failed, growth)


@dataclass(slots=True)
class _AttackRun:
    quiet_s: float
    """When the quiet time began, on the monotonic clock."""
    started_s: float
    before_mb: float | None
    ended_s: float = 0.0
    most_mb: float = 0.0
    answers: list[RawAnswer] = field(default_factory=list)

    def result(self, attack: Attack, others: _Others) -> AttackResult:
        return AttackResult(
            attack.name,
            len(self.answers),
            tuple(sorted({answer.status for answer in self.answers})),
            max(answer.seconds for answer in self.answers),
            others.itl_ms(self.quiet_s, self.started_s),
            others.itl_ms(self.started_s, self.ended_s),
            None if self.before_mb is None else self.most_mb - self.before_mb,
        )


async def _attack(client: RawClient, attack: Attack, plan: StructuredPlan, pids: Sequence[int]) -> _AttackRun:
    began_s = time.monotonic()
    await asyncio.sleep(plan.quiet_s)
    measured = _AttackRun(began_s, time.monotonic(), _memory_mb(pids))

    async def send() -> None:
        while not measured.answers or time.monotonic() < measured.started_s + plan.attack_s:
            measured.answers.append(await client.post(_body(attack.fields(len(measured.answers)))))
            await asyncio.sleep(plan.attack_pause_s)

    sending = asyncio.create_task(send())
    while not sending.done():
        await asyncio.wait([sending], timeout=_SAMPLE_S)
        measured.most_mb = max(measured.most_mb, _memory_mb(pids) or 0.0)
    await sending
    measured.ended_s = time.monotonic()
    return measured


class _Others:
    def __init__(self) -> None:
        self.answers: list[RawAnswer] = []

    @property
    def num_failed(self) -> int:
        return sum(answer.status != 200 or bool(answer.error) for answer in self.answers)

    @property
    def first_error(self) -> str:
        return next((answer.error for answer in self.answers if answer.error), "")

    def itl_ms(self, start_s: float, end_s: float) -> float | None:
        """Median milliseconds between events of one answer, of those that came in this time."""
        gaps = [
            1e3 * (later - earlier)
            for answer in self.answers
            for earlier, later in zip(answer.event_times_s, answer.event_times_s[1:], strict=False)
            if start_s <= earlier and later <= end_s
        ]
        return statistics.median(gaps) if gaps else None


@asynccontextmanager
async def _others(client: RawClient, prompts: Sequence[str], count: int) -> AsyncIterator[_Others]:
    others, is_over = _Others(), asyncio.Event()

    async def work(place: int) -> None:
        number = place
        while not is_over.is_set():
            prompt = f"# {number}\n{prompts[number % len(prompts)]}"
            asked = {"prompt": prompt, "max_tokens": 128, "ignore_eos": True}
            body = json.dumps({**asked, "temperature": 0, "stream": True}).encode()
            answer = await client.post(body)
            others.answers.append(answer)
            number += count
            if answer.status != 200:
                await asyncio.sleep(_SAMPLE_S)

    async with asyncio.TaskGroup() as group:
        for place in range(count):
            group.create_task(work(place))
        try:
            yield others
        finally:
            is_over.set()


def _body(fields: Fields) -> bytes:
    # Output tokens of a hostile request that is answered.
    asked = {"prompt": "a", "max_tokens": 8, "temperature": 0, **fields}
    return json.dumps(asked).encode()


def _memory_mb(pids: Sequence[int]) -> float | None:
    return sum(each.rss_bytes for each in read_memory(pids)) / 2**20 if pids else None
