"""Prediction proposer: where it stands after every kind of edit, what it proposes, and what it learns."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specray.drafting import PredictionProposer
from specray.drafting.prediction import (
    FIRST_PROPOSAL_LEN,
    MAX_EDITS,
    MAX_NEEDED,
    REACH,
    UNSURE_PROPOSAL_LEN,
    Edit,
    Edits,
)

TEXT = tuple(range(100, 160))


def follow(prediction: Sequence[int], output: Sequence[int]) -> PredictionProposer:
    """The proposer after the output, which nobody proposed."""
    proposer = PredictionProposer(prediction)
    proposer.extend(output)
    return proposer


def drive(
    prediction: Sequence[int], output: Sequence[int], k: int = 32
) -> tuple[list[tuple[int, int]], PredictionProposer]:
    """Rounds of an output: the tokens proposed and accepted in each."""
    proposer, rounds, done = PredictionProposer(prediction), list[tuple[int, int]](), 0
    while done < len(output):
        proposed = proposer.propose(min(k, len(output) - done - 1))
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == output[done + accepted]:
            accepted += 1
        if proposed:
            proposer.observe(accepted)
        proposer.extend(output[done : done + accepted + 1])
        done += accepted + 1
        rounds.append((len(proposed), accepted))
    return rounds, proposer


def test_nothing_is_written_yet() -> None:
    proposer = follow(TEXT, ())
    assert proposer.is_sure
    assert proposer.propose(3) == TEXT[:3]
    assert proposer.propose(0) == ()
    assert follow((), ()).propose(5) == ()


def test_long_proposals_begin_when_three_tokens_were_predicted() -> None:
    """A long one in vain costs what several steps do, and at first nothing speaks for the prediction."""
    proposer = follow(TEXT, ())
    assert proposer.propose(32) == TEXT[:FIRST_PROPOSAL_LEN] == TEXT[:4]
    proposer.extend(TEXT[:2])
    assert proposer.propose(32) == TEXT[2:6]
    proposer.extend(TEXT[2:3])
    assert proposer.propose(32) == TEXT[3:35]
    # What was matched once says so for good.
    assert follow(TEXT, (*TEXT[:3], 1, 2, *TEXT[5:8])).propose(32) == TEXT[8:40]


def test_each_proposal_in_vain_asks_for_twice_as_many_matching_tokens() -> None:
    text = tuple(range(100))
    for in_vain, needed in ((0, 1), (1, 2), (2, 4), (3, 8), (4, 12), (5, 12)):
        proposer = follow(text, text[:5])
        for _ in range(in_vain):
            proposer.observe(0)
        proposer.extend((-1, *text[5 : 4 + needed]))
        assert needed == 1 or proposer.propose(2) == ()
        proposer.extend(text[4 + needed : 5 + needed])
        assert proposer.propose(2) == text[5 + needed : 7 + needed]


def test_next_token_is_no_reason_to_propose_where_more_must_match() -> None:
    proposer = follow(TEXT, ())
    assert proposer.may_know_next
    proposer.observe(0)
    proposer.observe(0)
    # Four tokens must match now, and none does; then two, then three of them do.
    seen = []
    for token in (1, 2, *TEXT[2:6]):
        proposer.extend((token,))
        seen.append((proposer.may_know_next, bool(proposer.propose(1))))
    assert seen == [
        (False, False),
        (False, False),
        (False, False),
        (False, False),
        (True, False),
        (True, True),
    ]


def test_output_that_is_predicted_is_proposed_in_windows() -> None:
    rounds, proposer = drive(TEXT, TEXT, k=9)
    assert rounds == [(4, 4), *[(9, 9)] * 5, (4, 4)]
    assert proposer.num_matched == proposer.num_tokens == 60


def test_end_of_the_prediction_ends_the_proposals() -> None:
    assert follow(TEXT, TEXT[:58]).propose(5) == TEXT[58:]
    done = follow(TEXT, TEXT)
    assert (done.propose(5), done.is_sure, done.knows_place) == ((), False, False)
    done.extend((1, 2, 3))
    assert done.propose(5) == ()


NEW = (1, 2, 3, 4, 5)


@pytest.mark.parametrize("num_new", [1, 2, 3, 5])
def test_inserted_tokens(num_new: int) -> None:
    """One token that was predicted there is enough to go on."""
    output = (*TEXT[:20], *NEW[:num_new], TEXT[20])
    proposer = follow(TEXT, output)
    assert proposer.propose(4) == TEXT[21:25]
    assert not proposer.is_sure
    assert proposer.propose(32) == TEXT[21 : 21 + UNSURE_PROPOSAL_LEN]
    proposer.extend(TEXT[21:23])
    assert proposer.is_sure
    assert proposer.propose(32) == TEXT[23:55]
    assert proposer.num_matched == 23


@pytest.mark.parametrize("num_gone", [1, 2, 5, 8])
def test_deleted_tokens(num_gone: int) -> None:
    place = 20 + num_gone
    proposer = follow(TEXT, (*TEXT[:20], TEXT[place]))
    assert proposer.propose(4) == TEXT[place + 1 : place + 5]
    proposer.extend(TEXT[place + 1 : place + 3])
    assert proposer.is_sure
    assert proposer.num_matched == 23


@pytest.mark.parametrize("num_gone", [9, 25])
def test_many_deleted_tokens_are_passed_by_with_a_second_token(num_gone: int) -> None:
    place = 20 + num_gone
    assert follow(TEXT, (*TEXT[:20], TEXT[place])).propose(2) == TEXT[21:23]
    assert follow(TEXT, TEXT[:20] + TEXT[place : place + 2]).propose(4) == TEXT[place + 2 : place + 6]


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_replaced_tokens_are_taken_for_replaced_one_by_one(num_tokens: int) -> None:
    proposer = follow(TEXT, (*TEXT[:20], *NEW[:num_tokens]))
    assert proposer.propose(4) == TEXT[20 + num_tokens : 24 + num_tokens]
    assert not proposer.is_sure


def test_after_more_replaced_tokens_the_output_is_waited_for() -> None:
    assert follow(TEXT, (*TEXT[:20], *NEW[:3])).propose(4) == ()
    assert follow(TEXT, (*TEXT[:20], *NEW[:3], TEXT[23])).propose(4) == TEXT[24:28]
    # Three tokens in place of five.
    assert follow(TEXT, (*TEXT[:20], *NEW[:3], TEXT[25])).propose(4) == TEXT[26:30]


def test_guess_that_failed_is_not_made_again_before_the_place_is_sure() -> None:
    proposer = follow(TEXT, (*TEXT[:20], 1))
    assert proposer.propose(2) == TEXT[21:23]
    proposer.observe(0)
    proposer.extend((2,))
    assert proposer.propose(2) == ()
    proposer.extend(TEXT[21:22])
    assert proposer.propose(2) == TEXT[22:24]


def test_of_equal_tokens_the_nearest_to_the_expected_place_counts() -> None:
    """A comma stands everywhere; the one ahead by as many tokens as were written is meant."""
    text = (*range(10, 20), 0, *range(20, 23), 0, *range(23, 30), 0, *range(30, 40))
    proposer = follow(text, (*text[:12], 1, 2, 0))
    assert proposer.propose(3) == text[15:18]


def test_a_longer_match_counts_more_than_a_nearer_one() -> None:
    text = (*range(10, 20), 7, 8, 9, 3, *range(20, 30), 7, 8, 9, 4, *range(30, 40))
    proposer = follow(text, (*text[:10], 99, 98, 8, 9, 4))
    assert proposer.propose(3) == text[28:31]
    # With the same three tokens twice, the nearer place counts.
    assert follow(text, (*text[:8], 7, 8, 9)).propose(2) == text[13:15]


def test_output_that_was_lost_for_long_is_found_by_four_tokens_anywhere() -> None:
    text = tuple(range(1000, 1400))
    other = tuple(range(REACH + 3))
    lost = follow(text, (*text[:20], *other, *text[300:303]))
    assert lost.propose(4) == ()
    lost.extend(text[303:304])
    assert lost.propose(4) == text[304:308]
    assert lost.is_sure


def test_renamed_word_is_expected_after_it_was_renamed_twice() -> None:
    """Two tokens in place of three: the third time costs no round, and the rest of the window is right."""
    old, new = (7, 8, 9), (1, 2)
    blocks = [tuple(range(100 * n, 100 * n + 12)) for n in range(1, 6)]
    text = tuple(token for block in blocks for token in (*block, *old))
    output = tuple(token for block in blocks for token in (*block, *new))
    rounds, proposer = drive(text, output)
    # It diverges behind 12, the guess that one token was replaced fails, and the token behind the word tells
    # the place; so the second time.
    first = [(4, 4), (32, 7), (8, 0), (0, 0), (8, 8)]
    assert rounds == [*first, (32, 2), (8, 0), (0, 0), (8, 8), (31, 31)]
    assert proposer.num_matched == 60
    assert follow(text, output[:40]).propose(6) == (*new, *blocks[3][:4])


def test_renamed_word_is_learned_where_it_stands_two_tokens_apart() -> None:
    """Where the output never follows long enough for its place to be sure."""
    prediction, output = (7, 8, 1, 2) * 25, (9, 1, 2) * 25
    rounds, proposer = drive(prediction, output)
    assert len(rounds) <= 12
    assert proposer.is_sure or proposer.propose(1) == ()
    assert follow(prediction, output[:30]).propose(6) == (9, 1, 2, 9, 1, 2)


def test_edit_that_is_not_made_again_is_forgotten() -> None:
    text = tuple(token for n in range(6) for token in (*range(100 * n, 100 * n + 10), 7))
    output = [*text]
    output[10] = output[21] = 1
    proposer = follow(text, output[:32])
    assert proposer.propose(2) == (1, 300)
    proposer.observe(0)
    proposer.extend((7,))
    assert proposer.propose(12) == text[33:45]


def test_edit_that_is_made_again_in_part_is_a_divergence() -> None:
    text = tuple(token for n in range(6) for token in (*range(100 * n, 100 * n + 10), 7, 8))
    new = (91, 92, 93)
    output = (*text[:10], *new, *text[12:22], *new, *text[24:34])
    proposer = follow(text, output)
    assert proposer.propose(4) == (*new, 300)
    proposer.extend((91, 92, 94))
    assert proposer.propose(4) == ()
    proposer.extend(text[36:37])
    assert proposer.propose(4) == text[37:41]


def test_text_that_follows_nothing_is_left_after_a_few_proposals() -> None:
    source = random.Random(0)
    text = [source.randrange(50) for _ in range(2000)]
    output = [source.randrange(50) for _ in range(2000)]
    rounds, proposer = drive(text, output)
    in_vain = [proposed for proposed, accepted in rounds if proposed]
    assert 1 <= len(in_vain) <= 8
    assert in_vain[0] == FIRST_PROPOSAL_LEN
    assert sum(in_vain) <= FIRST_PROPOSAL_LEN + 7 * UNSURE_PROPOSAL_LEN
    assert proposer.num_matched < 60


def test_many_proposals_in_vain_ask_for_a_bounded_match() -> None:
    text = tuple(range(100))
    proposer = follow(text, text[:5])
    for _ in range(50):
        proposer.observe(0)
    proposer.extend((-1, *text[5 : 4 + MAX_NEEDED]))
    assert proposer.propose(2) == ()
    proposer.extend(text[4 + MAX_NEEDED : 5 + MAX_NEEDED])
    assert proposer.propose(2) == text[5 + MAX_NEEDED : 7 + MAX_NEEDED]


def test_tokens_count_as_matched_once_and_only_in_runs() -> None:
    # A lone token that stands in the prediction by chance is no part of it.
    assert follow(TEXT, (*TEXT[:10], 1, 2, TEXT[12], 3, 4)).num_matched == 10
    # The output repeats what it has written.
    assert follow(TEXT, (*TEXT[:20], *TEXT[5:20])).num_matched == 20


@pytest.mark.parametrize("seed", range(20))
def test_edited_text_takes_few_rounds(seed: int) -> None:
    """Inserted, deleted and replaced tokens every 30 to 60."""
    source = random.Random(seed)
    text = [source.randrange(400) for _ in range(600)]
    output: list[int] = []
    place = 0
    while place < len(text):
        span, size = source.randint(30, 60), source.randint(1, 4)
        output += text[place : place + span]
        place += span
        kind = source.choice("idr")
        if kind != "d":
            output += [source.randrange(400) for _ in range(size)]
        if kind != "i":
            place += size
    rounds, proposer = drive(text, output)
    assert len(output) / len(rounds) > 8
    assert sum(proposed for proposed, _ in rounds) < 2 * len(output)
    assert proposer.num_matched > 0.85 * len(text)


def test_edits_are_expected_when_made_twice() -> None:
    edits = Edits()
    edits.learn((5, 6), (1,))
    assert edits.at((5, 6, 7), 0) is None
    edits.learn((5, 6), (1,))
    assert edits.at((5, 6, 7), 0) == Edit((5, 6), (1,), 2)
    assert edits.at((4, 5, 6), 1) == Edit((5, 6), (1,), 2)
    assert edits.at((5, 7), 0) is None
    assert edits.at((5, 6), 2) is None
    # Another time something else was written.
    edits.learn((5, 6), (2,))
    assert edits.at((5, 6), 0) is None


def test_longest_edit_counts_and_the_oldest_is_forgotten() -> None:
    edits = Edits()
    for before in ((5,), (5, 6), (5, 6)):
        edits.learn(before, (9,))
    edits.learn((5,), (9,))
    assert edits.at((5, 6), 0) == Edit((5, 6), (9,), 2)
    edits.forget((5, 6))
    assert edits.at((5, 6), 0) == Edit((5,), (9,), 2)
    for token_id in range(100, 100 + MAX_EDITS):
        edits.learn((token_id,), (1,))
    assert edits.at((5, 6), 0) is None


@pytest.mark.parametrize(("before", "after"), [((), (1,)), ((1,), ()), ((1,) * 9, (2,)), ((1,), (2,) * 9)])
def test_what_is_no_name_is_not_learned(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    edits = Edits()
    for _ in range(3):
        edits.learn(before, after)
    assert edits.at(before, 0) is None
