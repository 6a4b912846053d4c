"""Writes the report of ``specray bench structured`` as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from specray.bench.core.report import DASH, grid_of, markdown_table, number, table_of
from specray.bench.structured.hostile import (
    ANSWER_GOAL_S,
    ITL_GOAL,
    MEMORY_GOAL_MB,
    ORDINARY,
    AttackResult,
    HostileResult,
)
from specray.bench.structured.judgement import ArmJudgement, Speed, judge, refusals
from specray.bench.structured.run import StructuredResult


def structured_report(
    conditions: Sequence[str], result: StructuredResult | None, hostile: HostileResult | None
) -> str:
    """The whole report.

    Args:
        conditions: under which it was measured, as lines of Markdown.
        result: of the schemas; None: they were not measured.
        hostile: of the attacks; None: the same.
    """
    parts = ["# Structured output", "> Written by `specray bench structured`.", "\n".join(conditions)]
    parts += [*(_schemas(result) if result else ()), *(_hostile(hostile) if hostile else ())]
    return "\n\n".join(parts) + "\n"


def _schemas(result: StructuredResult) -> Iterator[str]:
    plan, verdicts = result.plan, judge(result)
    yield f"## {len(result.cases)} schemas"
    yield (
        f"Model `{result.model}`, at most {plan.max_tokens} tokens, {plan.concurrency} at a time, seed "
        f"{plan.seed}; {result.duration_s / 60:.1f} minutes. Schemas by kind: {_kinds(result)}."
    )
    yield (
        "Arms: `off` is plain constrained decoding, `on` what the server chooses, `n-grams` is without the "
        "draft model. An answer that ended by itself is *valid* where `jsonschema` says so, formats "
        "included; *equal* answers have the tokens of `off`."
    )
    for columns in (_COUNTS, _SPEEDS):
        yield markdown_table(table_of("", {**_ARM, **columns}, verdicts, text=("arm",)))
    yield (
        "Tokens per second are of whole requests, prompts included, over the schemas that both arms "
        "answered; the speedup is over `off`. *Forced* and *drafted*: output tokens that came as draft "
        "tokens, of the grammar and of all other sources."
    )
    found = refusals(result)
    yield "Schemas that no grammar can enforce, by the word that the refusal has to name:"
    rows = [(f"`{word}`", count, found.named.get(word, 0)) for word, count in sorted(found.expected.items())]
    yield markdown_table(grid_of("", ["word", "schemas", "refused by it"], rows))
    if found.accepted:
        yield f"Answered all the same: {', '.join(found.accepted)}."
    yield from _listed("Refused, though composed to be enforced:", found.others)
    yield from _listed(_SHORT, [problem for verdict in verdicts for problem in verdict.problems])


def _kinds(result: StructuredResult) -> str:
    counts = Counter(kind for case in result.cases for kind in case.kinds)
    return ", ".join(f"{kind} {count}" for kind, count in counts.most_common())


def _listed(head: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from (head, "\n".join(f"- {line}" for line in lines))


def _speed(speed: Speed | None) -> str:
    return DASH if speed is None else f"{speed.tokens_per_s:.1f} ({speed.speedup:.2f}x)"


def _share(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.0f} %"


def _hostile(result: HostileResult) -> Iterator[str]:
    yield "## Hostile grammars"
    yield (
        f"Each attack goes on for seconds, one request at a time and each another variant, next to "
        f"{result.num_others} ordinary streams; the quiet ITL is theirs in the seconds before. Goals: a "
        f"refusal within {ANSWER_GOAL_S:g} s, an answer within {ANSWER_GOAL_S:g} s more than that to "
        f"{ORDINARY}, ITL within {ITL_GOAL:g} times, {MEMORY_GOAL_MB:g} MB."
    )
    yield markdown_table(table_of("", _ATTACKS, result.attacks, text=("status",)))
    growth = f"{_signed(result.memory_mb)} MB" if result.memory_mb is not None else DASH
    yield f"All attacks together: {growth}; {result.num_failed_others} ordinary requests failed."
    yield from _listed(_SHORT, result.shortfalls)


def _signed(value: float | None) -> str:
    return DASH if value is None else f"{value:+.0f}"


_SHORT = "What falls short:"
_ARM: dict[str, Callable[[ArmJudgement], object]] = {
    "temperature": lambda one: f"{one.temperature:g}",
    "arm": lambda one: one.arm,
}
_COUNTS: dict[str, Callable[[ArmJudgement], object]] = {
    "valid": lambda one: one.num_valid,
    "invalid": lambda one: one.num_invalid,
    "cut": lambda one: one.num_cut,
    "refused by name": lambda one: one.num_refused,
    "refused without": lambda one: one.num_refused_without_name,
    "failed": lambda one: one.num_failed,
}
_SPEEDS: dict[str, Callable[[ArmJudgement], object]] = {
    "equal": lambda one: f"{one.num_equal} of {one.num_compared}",
    "tokens/s": lambda one: number(one.speed.tokens_per_s, 1),
    "speedup": lambda one: one.speed.speedup,
    "fixed whitespace": lambda one: _speed(one.strict),
    "free whitespace": lambda one: _speed(one.free),
    "forced": lambda one: _share(one.forced_share),
    "drafted": lambda one: _share(one.drafted_share),
}
_ATTACKS: dict[str, Callable[[AttackResult], object]] = {
    "attack": lambda one: one.name,
    "requests": lambda one: one.num_sent,
    "status": lambda one: ", ".join(map(str, one.statuses)),
    "slowest, s": lambda one: number(one.slowest_s, 3),
    "quiet ITL, ms": lambda one: number(one.quiet_itl_ms, 1),
    "ITL, ms": lambda one: number(one.itl_ms, 1),
    "ratio": lambda one: one.itl_ratio,
    "memory, MB": lambda one: _signed(one.memory_mb),
}
