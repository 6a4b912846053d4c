"""Writes the report of ``specray bench structured`` as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from specray.bench.structured.hostile import (
    ANSWER_GOAL_S,
    ITL_GOAL,
    MEMORY_GOAL_MB,
    ORDINARY,
    HostileResult,
)
from specray.bench.structured.judgement import Speed, Verdict, judge, refusals
from specray.bench.structured.run import StructuredPlan, StructuredResult

_DASH = "–"


def structured_report(
    conditions: Sequence[str], result: StructuredResult | None, hostile: HostileResult | None
) -> str:
    """The whole report.

    Args:
        conditions: under which it was measured, as lines of Markdown.
        result: of the schemas; None: they were not measured.
        hostile: of the attacks; None: the same.
    """
    return "\n".join(_report(conditions, result, hostile)) + "\n"


def _report(
    conditions: Sequence[str], result: StructuredResult | None, hostile: HostileResult | None
) -> Iterator[str]:
    yield "# Structured output"
    yield ""
    yield "> Written by `specray bench structured`."
    yield ""
    yield from conditions
    if result is not None:
        yield from _schemas(result)
    if hostile is not None:
        yield from _hostile(hostile)


def _schemas(result: StructuredResult) -> Iterator[str]:
    plan, verdicts = result.plan, judge(result)
    yield ""
    yield f"## {len(plan.cases)} schemas"
    yield ""
    yield (
        f"Model `{result.model}`, at most {plan.max_tokens} tokens, {plan.concurrency} at a time, seed "
        f"{plan.seed}; {result.duration_s / 60:.1f} minutes. Schemas by kind: {_kinds(plan)}."
    )
    yield ""
    yield (
        "Arms: `off` is plain constrained decoding, `on` what the server chooses, `n-grams` is without the "
        "draft model. An answer that ended by itself is *valid* where `jsonschema` says so, formats "
        "included; *equal* answers have the tokens of `off`."
    )
    yield ""
    head = ("temperature", "arm", "valid", "invalid", "cut", "refused by name", "refused without", "failed")
    yield from _table(head, [_counts(verdict) for verdict in verdicts])
    yield ""
    speeds = ("temperature", "arm", "equal", "tokens/s", "speedup", "fixed whitespace", "free whitespace")
    yield from _table((*speeds, "forced", "drafted"), [_speeds(verdict) for verdict in verdicts])
    yield ""
    yield (
        "Tokens per second are of whole requests, prompts included, over the schemas that both arms "
        "answered; the speedup is over `off`. *Forced* and *drafted*: output tokens that came as draft "
        "tokens, of the grammar and of all other sources."
    )
    yield from _refusals(result)
    yield from _problems([problem for verdict in verdicts for problem in verdict.problems])


def _kinds(plan: StructuredPlan) -> str:
    counts = Counter(kind for case in plan.cases for kind in case.kinds)
    return ", ".join(f"{kind} {count}" for kind, count in counts.most_common())


def _counts(verdict: Verdict) -> tuple[object, ...]:
    return (
        f"{verdict.temperature:g}",
        verdict.arm,
        verdict.num_valid,
        verdict.num_invalid,
        verdict.num_cut,
        verdict.num_refused,
        verdict.num_refused_without_name,
        verdict.num_failed,
    )


def _speeds(verdict: Verdict) -> tuple[object, ...]:
    return (
        f"{verdict.temperature:g}",
        verdict.arm,
        f"{verdict.num_equal} of {verdict.num_compared}",
        f"{verdict.speed.tokens_per_s:.1f}",
        f"{verdict.speed.speedup:.2f}",
        _speed(verdict.strict),
        _speed(verdict.free),
        _share(verdict.forced_share),
        _share(verdict.drafted_share),
    )


def _speed(speed: Speed | None) -> str:
    return _DASH if speed is None else f"{speed.tokens_per_s:.1f} ({speed.speedup:.2f}x)"


def _share(share: float | None) -> str:
    return _DASH if share is None else f"{100 * share:.0f} %"


def _refusals(result: StructuredResult) -> Iterator[str]:
    found = refusals(result)
    yield ""
    yield "Schemas that no grammar can enforce, by the word that the refusal has to name:"
    yield ""
    rows = [(f"`{word}`", count, found.named.get(word, 0)) for word, count in sorted(found.expected.items())]
    yield from _table(("word", "schemas", "refused by it"), rows)
    if found.accepted:
        yield from ("", f"Answered all the same: {', '.join(found.accepted)}.")
    if found.others:
        yield from ("", "Refused, though composed to be enforced:", "")
        yield from (f"- {message}" for message in found.others)


def _problems(problems: Sequence[str]) -> Iterator[str]:
    if problems:
        yield from ("", "What falls short:", "")
        yield from (f"- {problem}" for problem in problems)


def _hostile(result: HostileResult) -> Iterator[str]:
    yield ""
    yield "## Hostile grammars"
    yield ""
    yield (
        f"Each attack goes on for seconds, one request at a time and each another variant, beside "
        f"{result.num_others} ordinary streams; the quiet ITL is theirs in the seconds before. Goals: a "
        f"refusal within {ANSWER_GOAL_S:g} s, an answer within {ANSWER_GOAL_S:g} s more than that to "
        f"{ORDINARY}, ITL within {ITL_GOAL:g} times, {MEMORY_GOAL_MB:g} MB."
    )
    yield ""
    rows = [
        (
            each.name,
            each.num_sent,
            ", ".join(map(str, each.statuses)),
            f"{each.slowest_s:.3f}",
            *(_DASH if value is None else f"{value:.1f}" for value in (each.quiet_itl_ms, each.itl_ms)),
            _DASH if each.itl_ratio is None else f"{each.itl_ratio:.2f}",
            _DASH if each.memory_mb is None else f"{each.memory_mb:+.0f}",
        )
        for each in result.attacks
    ]
    head = ("attack", "requests", "status", "slowest, s", "quiet ITL, ms", "ITL, ms", "ratio", "memory, MB")
    yield from _table(head, rows)
    yield ""
    growth = _DASH if result.memory_mb is None else f"{result.memory_mb:+.0f} MB"
    yield f"All attacks together: {growth}; {result.num_failed_others} ordinary requests failed."
    yield from _problems(result.shortfalls)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"
