"""Why and where an output ends, and what a session has counted by then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specray.requests import FinishReason, SpeculationStats
from specray.router.session.session import Session
from specray.types import TokenLogprobs
from tests.unit.router.harness import request
from tests.unit.router.session.harness import PROMPT, ROOM, decoding, propose, verdict


class Stops:
    """Matches when the tokens end with what it was given."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = list(tokens)
        self._seen: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str | None:
        self._seen += token_ids
        return "END" if self._seen[-len(self._tokens) :] == self._tokens else None


def test_stop_inside_accepted_tokens_drops_what_follows_and_its_logprobs() -> None:
    session = decoding(stop_token_ids=(11,), num_logprobs=0)
    propose(session, (10, 11, 12))
    session.verify_item(ROOM)
    logprobs = tuple(TokenLogprobs(token, -1.0) for token in (10, 11, 12, 13))
    commit = verdict(session, 3, 13, logprobs=logprobs)
    assert commit is not None
    assert (commit.token_ids, commit.logprobs) == ((10, 11), logprobs[:2])
    assert (session.finish_reason, session.stop_reason) == (FinishReason.STOP, 11)
    assert session.committed == [*PROMPT, 9, 10, 11]
    assert session.tally.num_verified_tokens == 1 + 4
    # The control learns that all three were right; the third is no part of the output.
    assert (commit.num_accepted_tokens, commit.num_kept_tokens) == (3, 2)
    assert session.tally.stats == SpeculationStats(1, 3, 2, (0, 0, 1, 0))


def test_end_of_sequence_gives_no_stop_reason() -> None:
    session = decoding(stop_token_ids=(11,), eos=(11,))
    session.verify_item(ROOM)
    verdict(session, 0, 11)
    assert (session.finish_reason, session.stop_reason) == (FinishReason.STOP, None)


def test_stop_string_ends_with_the_token_that_completes_it() -> None:
    session = Session(request("a", PROMPT, stop=("END",)), Stops(10, 11), vocab_size=64)
    session.verify_item(ROOM)
    verdict(session, 0, 9)
    propose(session, (10, 11, 12))
    session.verify_item(ROOM)
    commit = verdict(session, 3, 13)
    assert commit is not None and commit.token_ids == (10, 11)
    assert (session.finish_reason, session.stop_reason) == (FinishReason.STOP, "END")


@pytest.mark.parametrize(("min_tokens", "is_finished"), [(2, True), (3, False)])
def test_stop_string_counts_from_min_tokens_on(min_tokens: int, is_finished: bool) -> None:
    given = request("a", PROMPT, stop=("END",), min_tokens=min_tokens)
    session = Session(given, Stops(9, 10, 11), vocab_size=64)
    session.verify_item(ROOM)
    verdict(session, 0, 9)
    propose(session, (10, 11))
    session.verify_item(ROOM)
    verdict(session, 2, 12)
    assert session.is_finished == is_finished
    assert session.num_output_tokens == (3 if is_finished else 4)


def test_length_cut() -> None:
    session = decoding(max_tokens=3)
    propose(session, (10,))
    session.verify_item(ROOM)
    commit = verdict(session, 1, 11)
    assert commit is not None and commit.token_ids == (10, 11)
    assert (session.finish_reason, session.stop_reason) == (FinishReason.LENGTH, None)


def test_stop_token_at_the_last_place_is_a_stop() -> None:
    session = decoding(max_tokens=2, stop_token_ids=(11,))
    session.verify_item(ROOM)
    verdict(session, 0, 11)
    assert session.finish_reason is FinishReason.STOP


def test_histogram_is_as_long_as_the_longest_proposal_plus_one() -> None:
    session = decoding()
    for tokens, num_accepted in (((10, 11, 12), 2), ((10,), 0), ((), 0)):
        propose(session, tokens)
        session.verify_item(ROOM)
        verdict(session, num_accepted, 20)
    stats = session.tally.stats
    assert stats.acceptance_histogram == (1, 0, 1, 0)
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (2, 4, 2)
    assert session.tally.num_rounds == 4
