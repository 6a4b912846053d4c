"""Rounds under a grammar: tokens that it forces are verified first, and change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from specray.control.mode import ModeController
from specray.fakes import EmptyGuesser
from specray.interfaces import OutputGrammarFactory
from specray.requests import GenerateRequest, SpeculationParams
from specray.types import DraftKind, Grammar, GrammarKind
from tests.unit.router.harness import fake_draft, request
from tests.unit.router.proposers.harness import CHANGING, of_source, serve_and_ask, truth

NUM_TOKENS = 48


def with_grammar(given: GenerateRequest) -> GenerateRequest:
    return replace(given, sampling=replace(given.sampling, grammar=Grammar(GrammarKind.REGEX, "x")))


class Forcing:
    """A grammar that forces every other four tokens of a known output."""

    def __init__(self, output: Sequence[int]) -> None:
        self._output = tuple(output)

    def count_legal(self, output_ids: Sequence[int], token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def forced(self, output_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        place = len(output_ids)
        return self._output[place : place + 4 - place % 8][:limit] if place % 8 < 4 else ()


def forcing(output: Sequence[int]) -> OutputGrammarFactory:
    async def make(grammar: Grammar, stop_token_ids: Sequence[int]) -> Forcing:
        return Forcing(output)

    return make


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 3},
        {"num_speculative_tokens": 3, "fallback": "ngram"},
        {"has_draft_model": False},
        {"draft_kind": DraftKind.NGRAM, "has_draft_model": False},
    ],
    ids=["beside a draft model", "before n-grams", "alone", "with n-grams"],
)
def test_forced_tokens_are_accepted_and_change_no_token(options: dict[str, object]) -> None:
    given = with_grammar(request("a", (1, 2, 3), NUM_TOKENS))
    output = truth(CHANGING, given)
    outputs, pair = serve_and_ask(CHANGING, [given], grammars=forcing(output), **options)
    assert outputs[0].token_ids == output
    _, drafted, accepted = of_source(pair, "grammar")
    assert drafted == accepted >= NUM_TOKENS / 4


def test_forced_tokens_are_verified_while_all_sessions_decode_plainly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ModeController, "is_plain", True)
    given = with_grammar(request("a", (1, 2, 3), NUM_TOKENS))
    output = truth(CHANGING, given)
    _, pair = serve_and_ask(CHANGING, [given], grammars=forcing(output), draft=fake_draft(EmptyGuesser()))
    # Four of each eight.
    assert of_source(pair, "grammar")[1:] == (24, 24)


def test_request_that_switches_speculation_off_gets_no_forced_tokens() -> None:
    given = with_grammar(
        request("a", (1, 2, 3), NUM_TOKENS, speculation=SpeculationParams(num_speculative_tokens=0))
    )
    output = truth(CHANGING, given)
    outputs, pair = serve_and_ask(CHANGING, [given], grammars=forcing(output))
    assert outputs[0].token_ids == output
    assert of_source(pair, "grammar") == (0, 0, 0)


def test_request_without_a_grammar_asks_for_none() -> None:
    async def never(grammar: Grammar, stop_token_ids: Sequence[int]) -> Forcing:
        raise AssertionError("it has no grammar")

    given = request("a", (1, 2, 3), 8)
    outputs, _ = serve_and_ask(CHANGING, [given], grammars=never)
    assert outputs[0].token_ids == truth(CHANGING, given)
