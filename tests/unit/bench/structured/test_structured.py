"""A small run against a server whose model draws from its grammars, and what is made of the answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specray.bench.plans import StructuredPlan
from specray.bench.structured.hostile import ORDINARY, AttackResult, HostileResult, attacks, measure_hostile
from specray.bench.structured.judgement import judge, refusals, shortfalls
from specray.bench.structured.report import structured_report
from specray.bench.structured.run import Answer, Group, StructuredResult, measure_structured
from specray.bench.structured.schemas import SchemaCase, compose
from specray.errors import EngineLostError, SpecrayError
from specray.fakes import FakeRouterClient
from specray.tokenization import make_stop_matcher
from tests.unit.serving.http.chat.models import PLAIN, babbling, chat_tokenizer, service_info
from tests.unit.serving.http.service import RealClock, serving

NUMBER = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
CASE = SchemaCase("one", "a number", NUMBER, frozenset({"bounds"}), is_strict=False)
STRICT = replace(CASE, name="two", is_strict=True)
REFUSED = replace(CASE, name="three", refused_by='"not"')
VALID = Answer(CASE, "off", 0.0, text='{"n": 3}', token_ids=(5, 6, 7, 8), has_ended=True, seconds=2.0)


def quiet(name: str, num_done: int, num_all: int) -> None:
    assert 0 <= num_done < num_all


def result_of(*groups: Group) -> StructuredResult:
    return StructuredResult(StructuredPlan(), [CASE, STRICT, REFUSED], "tiny", groups, 60.0)


@pytest.mark.slow
async def test_small_run_asks_for_every_schema_in_every_arm() -> None:
    router = babbling(PLAIN, seed=None)
    cases = compose(10, 0)
    async with serving(router) as service:
        plan = StructuredPlan(service.url, arm=["on"], max_tokens=60, concurrency=3)
        result = await measure_structured(plan, cases, quiet)
    verdicts = judge(result)
    assert [(verdict.temperature, verdict.arm) for verdict in verdicts] == [
        (temperature, arm) for temperature in (0.0, 1.0) for arm in ("off", "on")
    ]
    refused = [case for case in cases if case.refused_by]
    for verdict in verdicts:
        assert (verdict.num_refused, verdict.num_refused_without_name) == (len(refused), 0)
        assert verdict.num_valid + verdict.num_cut == len(cases) - len(refused)
        assert verdict.num_valid >= 4 and verdict.num_invalid == verdict.num_failed == 0
        # The model draws with the seed alone.
        assert verdict.num_equal == verdict.num_compared == len(cases) - len(refused)
        assert verdict.speed.num_tokens > 100 and verdict.speed.tokens_per_s > 0
    assert shortfalls(result) == []
    sent = router.requests
    assert {request.speculation.enabled for request in sent} == {False, True}
    assert {request.sampling.temperature for request in sent} == {0.0, 1.0}
    report = structured_report(["A machine."], result, None)
    assert "\nA machine.\n" in report
    assert "| 1 | on |" in report and "What falls short" not in report


def test_answers_are_judged_one_by_one() -> None:
    off = Group(
        "off", 0.0, [VALID, replace(VALID, case=STRICT), Answer(REFUSED, "off", 0.0, refusal='a "not" b')]
    )
    on = Group(
        "on",
        0.0,
        [
            replace(VALID, arm="on", text='{"n": 30}', seconds=1.0),
            Answer(STRICT, "on", 0.0, text='{"n"', token_ids=(5, 6), seconds=0.5),
            Answer(REFUSED, "on", 0.0, refusal="it cannot be"),
            Answer(CASE, "on", 0.0, failure="lost"),
        ],
    )
    on.accepted.update({"grammar": 2, "model": 1})
    plain, speculative = judge(result_of(off, on))
    assert (plain.num_valid, plain.num_refused, plain.num_equal, plain.num_compared) == (2, 1, 2, 2)
    assert (plain.speed.speedup, plain.forced_share) == (1.0, 0.0)
    assert (speculative.num_invalid, speculative.num_cut, speculative.num_failed) == (1, 1, 1)
    assert (speculative.num_refused, speculative.num_refused_without_name) == (0, 1)
    assert (speculative.num_equal, speculative.num_compared) == (1, 2)
    assert speculative.speed.tokens_per_s == 6 / 1.5
    assert speculative.speed.speedup == (6 / 1.5) / (8 / 4)
    assert speculative.strict is not None and speculative.strict.num_tokens == 2
    assert speculative.free is not None and speculative.free.tokens_per_s == 4
    assert (speculative.forced_share, speculative.drafted_share) == (2 / 6, 1 / 6)
    assert len(shortfalls(result_of(off, on))) == 3
    assert any("30 is greater than the maximum of 9" in problem for problem in speculative.problems)


@pytest.mark.parametrize(("text", "is_valid"), [('{"n": 3', False), ("3", False), ('{"n": 3}', True)])
def test_answer_that_ended_has_to_be_json_of_the_schema(text: str, is_valid: bool) -> None:
    (verdict,) = judge(result_of(Group("off", 0.0, [replace(VALID, text=text)])))
    assert (verdict.num_valid, verdict.num_invalid) == ((1, 0) if is_valid else (0, 1))


def test_refusals_are_told_by_word() -> None:
    answers = [
        Answer(REFUSED, "off", 0.0, refusal='Unimplemented: "not"'),
        replace(VALID, case=replace(REFUSED, refused_by='"if"')),
        Answer(CASE, "off", 0.0, refusal="too large"),
    ]
    found = refusals(result_of(Group("off", 0.0, answers)))
    assert (found.expected, found.named) == ({'"not"': 1, '"if"': 1}, {'"not"': 1})
    assert (found.others, found.accepted) == (("one: too large",), ('"if"',))


async def test_server_that_is_away_is_an_error() -> None:
    with pytest.raises(EngineLostError):
        await measure_structured(StructuredPlan("http://127.0.0.1:1"), [CASE], quiet)


def writing(reply: Any) -> FakeRouterClient:
    tokenizer = chat_tokenizer(PLAIN)
    return FakeRouterClient(
        reply=reply,
        clock=RealClock(),
        chunk_interval_s=0.002,
        info=service_info(tokenizer),
        stop_matcher_factory=make_stop_matcher(tokenizer),
    )


async def attack(router: FakeRouterClient, *names: str) -> HostileResult:
    """Each attack is one request: what follows it at once comes too late for ``attack_s``."""
    async with serving(router, tokenizer=chat_tokenizer(PLAIN)) as service:
        plan = StructuredPlan(
            service.url, attack=list(names), quiet_s=0.05, attack_s=0.01, attack_pause_s=0.02, timeout_s=30.0
        )
        return await measure_hostile(plan, ["def a():"], quiet)


@pytest.mark.slow
async def test_hostile_grammars_are_answered_or_refused_while_others_are_served() -> None:
    router = writing(lambda request: (200,) * request.max_tokens)
    result = await attack(router)
    assert [each.name for each in result.attacks] == [each.name for each in attacks()]
    assert {status for each in result.attacks for status in each.statuses} == {200, 400}
    assert result.num_failed_others == 0
    assert all(each.quiet_itl_ms is None or each.quiet_itl_ms >= 2 for each in result.attacks)
    refused = {each.name for each in result.attacks if each.statuses == (400,)}
    assert {"anyOf, 300 deep", "arrays, 2000 deep", "5000 properties", "16 patterns in allOf"} <= refused
    report = structured_report(["A machine."], None, result)
    assert report.count("\n| regex") == 4


async def test_others_that_fail_are_told() -> None:
    def fail(request: Any) -> Any:
        raise SpecrayError("broken")

    with pytest.raises(SpecrayError, match="no ordinary request was answered"):
        await attack(writing(fail), "enum of 5000")


def test_variants_of_an_attack_differ_and_shortfalls_name_their_goal() -> None:
    for each in attacks():
        assert each.fields(0) != each.fields(1)
    ordinary = AttackResult(ORDINARY, 3, (200,), 2.0, 10.0, 12.0, 0.0)
    good = AttackResult("good", 3, (400,), 0.9, 10.0, 19.0, 49.0)
    long = AttackResult("long", 3, (200, 400), 2.9, 10.0, None, 49.0)
    assert HostileResult(2, (ordinary, good, long), 0, 60.0).shortfalls == ()
    slow = AttackResult("slow", 3, (400,), 1.1, None, None, None)
    slower = AttackResult("slower", 3, (200,), 3.1, None, 20.0, None)
    bad = AttackResult("bad", 3, (0, 500), 0.1, 10.0, 21.0, 51.0)
    found = HostileResult(2, (ordinary, slow, slower, bad), 1, 60.0).shortfalls
    names = [problem.split(":")[0] for problem in found]
    assert names == ["slow", "slower", "bad", "bad", "bad", "1 ordinary requests failed"]
