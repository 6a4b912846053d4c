"""What the answers of a run say: how many keep their schemas, are equal under speculation, and how fast."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specray.bench.structured.run import OFF, Answer, Group, StructuredResult

_MAX_KEPT = 5
"""Largest number of problems of a kind that are kept as text."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Time and tokens of one group, over the schemas that all arms answered."""

    num_tokens: int
    tokens_per_s: float
    speedup: float
    """Over plain constrained decoding at the same temperature."""


@dataclass(frozen=True, slots=True)
class ArmJudgement:
    arm: str
    temperature: float
    num_valid: int
    """Answers that ended by themselves and keep their schema."""
    num_invalid: int
    """Answers that ended by themselves and do not."""
    num_cut: int
    num_refused: int
    """Refusals that name a keyword of the schema."""
    num_refused_without_name: int
    num_failed: int
    num_equal: int
    """Answers with the tokens of plain constrained decoding."""
    num_compared: int
    speed: Speed
    strict: Speed | None
    """Speed over schemas with fixed whitespace; None: there were none."""
    free: Speed | None
    forced_share: float | None
    """Output tokens that the grammar forced and that came as draft tokens; None: without output."""
    drafted_share: float | None
    """Output tokens that came as other draft tokens."""
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusals:
    """Refused schemas by the word that a refusal has to name."""

    expected: dict[str, int]
    """Schemas that cannot be enforced, as they were composed."""
    named: dict[str, int]
    """Schemas that were refused, by that word."""
    others: tuple[str, ...]
    """Messages of refused schemas that were composed to be enforced."""
    accepted: tuple[str, ...]
    """Words of schemas that were answered, though nothing enforces them."""


def judge(result: StructuredResult) -> list[ArmJudgement]:
    return [_verdict(group, _plain(result.groups, group)) for group in result.groups]


def refusals(result: StructuredResult) -> Refusals:
    """Returns what became of the schemas that cannot be enforced; those of the first group stand for all."""
    expected, named = Counter[str](), Counter[str]()
    others, accepted = list[str](), list[str]()
    for answer in result.groups[0].answers:
        word = answer.case.refused_by
        if word is not None:
            expected[word] += 1
            if answer.refusal is None:
                accepted.append(word)
            elif word in answer.refusal:
                named[word] += 1
        elif answer.refusal is not None:
            others.append(f"{answer.case.name}: {answer.refusal}")
    return Refusals(dict(expected), dict(named), tuple(others), tuple(accepted))


def shortfalls(result: StructuredResult) -> list[str]:
    """Returns what no answer may be: invalid, refused without a name, or failed."""
    return [problem for verdict in judge(result) for problem in verdict.problems]


def _plain(groups: Sequence[Group], group: Group) -> Group:
    return next(each for each in groups if each.arm == OFF and each.temperature == group.temperature)


def _verdict(group: Group, plain: Group) -> ArmJudgement:
    kinds, problems = Counter[str](), list[str]()
    for answer in group.answers:
        kind, problem = _kind(answer)
        kinds[kind] += 1
        if problem and len(problems) < _MAX_KEPT:
            problems.append(f"{group.arm}, temperature {group.temperature:g}, {answer.case.name}: {problem}")
    pairs = _answered_by_both(group, plain)
    num_tokens = sum(len(answer.token_ids) for answer in group.answers)
    num_forced = group.accepted["grammar"]
    num_drafted = sum(group.accepted.values()) - num_forced
    return ArmJudgement(
        group.arm,
        group.temperature,
        num_valid=kinds["valid"],
        num_invalid=kinds["invalid"],
        num_cut=kinds["cut"],
        num_refused=kinds["refused"],
        num_refused_without_name=kinds["refused without a name"],
        num_failed=kinds["failed"],
        num_equal=sum(own.token_ids == other.token_ids for own, other in pairs),
        num_compared=len(pairs),
        speed=_speed(pairs) or Speed(0, 0.0, 0.0),
        strict=_speed([pair for pair in pairs if pair[0].case.is_strict]),
        free=_speed([pair for pair in pairs if not pair[0].case.is_strict]),
        forced_share=num_forced / num_tokens if num_tokens else None,
        drafted_share=num_drafted / num_tokens if num_tokens else None,
        problems=tuple(problems),
    )


def _kind(answer: Answer) -> tuple[str, str | None]:
    if answer.failure is not None:
        return "failed", answer.failure
    if answer.refusal is not None:
        words = (
            [answer.case.refused_by]
            if answer.case.refused_by
            else map(json.dumps, _words(answer.case.schema))
        )
        is_named = any(word in answer.refusal for word in words)
        return ("refused", None) if is_named else ("refused without a name", answer.refusal)
    if not answer.has_ended:
        return "cut", None
    problem = why_invalid(answer)
    return ("valid", None) if problem is None else ("invalid", f"{problem}: {answer.text[:200]}")


def why_invalid(answer: Answer) -> str | None:
    """Why an answer breaks its schema; None: it does not."""
    import jsonschema

    try:
        value = json.loads(answer.text)
    except ValueError as error:
        return f"no JSON: {error}"
    kind = jsonschema.Draft202012Validator
    problem = next(kind(answer.case.schema, format_checker=kind.FORMAT_CHECKER).iter_errors(value), None)
    return None if problem is None else str(problem.message)[:200]


def _words(schema: object) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(_words, schema))
    if not isinstance(schema, dict):
        return set()
    own = set(schema) | ({schema["format"]} if isinstance(schema.get("format"), str) else set())
    return own.union(*map(_words, schema.values()))


def _answered_by_both(group: Group, plain: Group) -> list[tuple[Answer, Answer]]:
    others = {answer.case.name: answer for answer in plain.answers if answer.token_ids}
    return [
        (answer, others[answer.case.name])
        for answer in group.answers
        if answer.token_ids and answer.case.name in others
    ]


def _speed(pairs: Sequence[tuple[Answer, Answer]]) -> Speed | None:
    if not pairs:
        return None
    rates = [
        sum(len(answer.token_ids) for answer in answers) / sum(answer.seconds for answer in answers)
        for answers in zip(*pairs, strict=True)
    ]
    return Speed(sum(len(answer.token_ids) for answer, _ in pairs), rates[0], rates[0] / rates[1])
