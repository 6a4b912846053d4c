"""Sequences with states go on where others have left snapshots, and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.cache.prefix import PrefixIndex
from specray.engine.cache.snapshots import SPARE_TOKENS, Snapshots
from specray.engine.cache.state_slots import STATE_UNIT
from specray.engine.target.engine import TargetEngine
from specray.types import SamplingParams, Verdict, VerifyItem
from tests.unit.engine.cache.state_runner import StateRunner, first_token, state_target
from tests.unit.engine.harness import (
    TARGET,
    VOCAB_SIZE,
    Session,
    commit,
    generate_serial,
    model_logits,
    target_only,
    verify_item,
)

GREEDY = SamplingParams(temperature=0.0)


def tokens(seed: int, count: int) -> list[int]:
    return [(seed * 7 + 3 * i * i + 5 * i) % (VOCAB_SIZE - 2) + 2 for i in range(count)]


def expected(prompt: Sequence[int], num_output: int) -> list[int]:
    return target_only(lambda prefix: model_logits(TARGET, prefix), list(prompt), GREEDY, num_output)


def drafter(prompt: Sequence[int], num_output: int, num_right: int):  # type: ignore[no-untyped-def]
    """Draft tokens of which the first so many are right."""
    right = [*prompt, *expected(prompt, num_output + 16)]

    def draft(session: Session, count: int) -> DraftTokens:
        at = len(session.token_ids)
        return DraftTokens(
            tuple((token + (i >= num_right)) % VOCAB_SIZE for i, token in enumerate(right[at : at + count]))
        )

    return draft


def say(
    target: TargetEngine,
    name: str,
    prompt: Sequence[int],
    num_output: int,
    *,
    borders: Sequence[int] = (),
    num_right: int = 3,
    num_drafts: int = 5,
) -> tuple[list[int], int]:
    """Prompt and output of a request, and how many tokens of its prompt were found."""
    sampling = replace(GREEDY, num_prompt_tokens=len(prompt), message_borders=tuple(borders))
    session = Session(name, list(prompt), sampling)
    before = target.info.num_prefix_cache_hits
    if num_output:
        output = generate_serial(
            target, drafter(prompt, num_output, num_right), session, num_output, num_drafts
        )
        assert output == expected(prompt, num_output)
    found = target.info.num_prefix_cache_hits - before
    target.release([name])
    target.check_integrity()
    return session.token_ids, found


@pytest.mark.parametrize("block_size", [16, 48, 40, 1024])
@pytest.mark.parametrize("num_drafts", [0, 5, 7])
def test_a_chat_loses_less_than_a_unit_of_states_each_turn(block_size: int, num_drafts: int) -> None:
    """Also with speculation: 64 tokens and a unit of keys and values, at most. With blocks of 40 tokens a
    unit of keys and values ends at every fifth multiple of 64 only."""
    target, _ = state_target(block_size=block_size)
    history, found = tokens(1, 30), []
    for turn in range(8):
        prompt = [*history, *tokens(turn, 41)]
        history, cached = say(target, f"turn {turn}", prompt, 50, num_drafts=num_drafts)
        found.append(cached)
        if turn and block_size != 40:
            known = len(prompt) - 41 - 1
            assert known - 64 - 16 < cached <= known and cached % STATE_UNIT == 0
    lost = {0: 0, 5: 0, 7: 0}
    assert found[0] == lost[num_drafts] and found == sorted(found)


def test_a_retry_and_a_branch_find_their_prompts_borders() -> None:
    target, _ = state_target()
    prompt = tokens(3, 500)
    first_token(target, "a", prompt, borders=(300, 490))
    assert first_token(target, "retry", prompt).num_cached_tokens == 448
    assert (
        first_token(target, "another last message", [*prompt[:300], *tokens(5, 70)]).num_cached_tokens == 256
    )
    assert first_token(target, "another ending", [*prompt[:490], *tokens(6, 70)]).num_cached_tokens == 448


def test_the_second_of_a_shared_prefix_pays_once_and_the_third_finds_it() -> None:
    target, _ = state_target()
    shared = tokens(1, 200)
    found = [
        first_token(target, str(number), [*shared, *tokens(10 + number, 300)]).num_cached_tokens
        for number in range(3)
    ]
    assert found == [0, 0, 192]


def test_keys_and_values_behind_the_snapshot_are_computed_again() -> None:
    target, runner = state_target()
    prompt = tokens(1, 250)
    first_token(target, "a", prompt)
    before = runner.num_rows
    assert first_token(target, "b", prompt).num_cached_tokens == 192
    assert runner.num_rows - before == 250 - 192


def test_a_chunk_stops_where_any_cut_would_and_its_snapshot_is_found_when_it_is_known() -> None:
    """A snapshot behind the last token of a chunk has its name only with the next token."""
    target, runner = state_target()
    prompt = tokens(1, 260)
    sampling = replace(GREEDY, num_prompt_tokens=260, message_borders=(128,))
    chunk = VerifyItem("a", 1, 0, tuple(prompt[:128]), NO_DRAFT, sample=False, sampling=sampling)
    target.verify([chunk])
    assert target.info.num_snapshots_held == 0
    target.check_integrity()
    target.verify([VerifyItem("a", 2, 128, tuple(prompt[128:200]), NO_DRAFT, sample=False)])
    assert (runner.num_rows, target.info.num_snapshots_held) == (192, 1)
    target.verify([VerifyItem("a", 3, 200, tuple(prompt[200:]), NO_DRAFT)])
    assert (runner.num_rows, target.info.num_snapshots_held) == (260, 2)
    assert first_token(target, "b", [*prompt[:130], 5, 6]).num_cached_tokens == 128


def test_a_preempted_request_goes_on_from_its_output() -> None:
    target, _ = state_target()
    prompt = tokens(2, 100)
    told, _ = say(target, "a", prompt, 80)
    session = Session("again", list(told), replace(GREEDY, num_prompt_tokens=100))
    draft = drafter(prompt, 160, 3)
    output = generate_serial(target, draft, session, 40, 5)
    assert [*told[100:], *output] == expected(prompt, len(told) - 100 + 40)
    assert target.info.num_prefix_cache_hits == (len(told) - 1) // STATE_UNIT * STATE_UNIT


def test_of_prompts_alone_nothing_behind_an_output_is_used_again() -> None:
    target, _ = state_target(prefix_cache="exact")  # type: ignore[arg-type]
    told, _ = say(target, "a", tokens(2, 128), 200)
    assert first_token(target, "b", told).num_cached_tokens == 64
    assert first_token(target, "c", told).num_cached_tokens == (len(told) - 1) // 64 * 64


def test_a_step_that_fails_leaves_no_snapshot() -> None:
    target, runner = state_target()
    prompt, sampling = tokens(1, 200), replace(GREEDY, num_prompt_tokens=200)
    item = VerifyItem("a", 1, 0, tuple(prompt), sampling=sampling)
    runner.fails = True
    with pytest.raises(ZeroDivisionError):
        target.verify([item])
    target.check_integrity()
    assert target.info.num_snapshots_held == 0
    [reply] = target.verify([item]).replies
    assert isinstance(reply, Verdict) and [reply.next_token_id] == expected(prompt, 1)
    assert target.info.num_snapshots_held == 1
    assert first_token(target, "b", prompt).num_cached_tokens == 192


@pytest.mark.parametrize("block_size", [16, 1024])
def test_a_round_that_fails_is_computed_from_a_snapshot_on(block_size: int) -> None:
    target, runner = state_target(block_size=block_size)
    prompt = tokens(1, 200)
    session = Session("a", list(prompt), replace(GREEDY, num_prompt_tokens=200))
    generate_serial(target, drafter(prompt, 9, 0), session, 2, 2)
    runner.fails = True
    item, before = verify_item(session, NO_DRAFT), runner.num_rows
    with pytest.raises(ZeroDivisionError):
        target.verify([item])
    [reply] = target.verify([item]).replies
    assert isinstance(reply, Verdict)
    assert [reply.next_token_id] == expected(prompt, 3)[2:]
    assert runner.num_rows - before == len(session.token_ids) - 192


def test_one_behind_an_output_moves_on_unless_others_have_found_it() -> None:
    target, runner = state_target()
    prompt = tokens(1, 100)
    session = Session("a", list(prompt), replace(GREEDY, num_prompt_tokens=100))
    draft = drafter(prompt, 400, 3)
    generate_serial(target, draft, session, 110, 5)
    # That of the prompt, and one that has moved from 128 to 192.
    assert sorted(map(len, runner.kept.values())) == [64, 192]
    branch = [*session.token_ids[:194], 5, 6, 7]
    assert first_token(target, "b", branch).num_cached_tokens == 192
    generate_serial(target, draft, session, 70, 5)
    assert sorted(map(len, runner.kept.values())) == [64, 192, 256]
    assert first_token(target, "c", branch).num_cached_tokens == 192


def test_a_border_that_was_passed_without_a_place_is_lost() -> None:
    target, runner = state_target(num_snapshots=1)
    pool = target.table.snapshots
    assert pool is not None
    place = pool.take(1)
    assert place is not None
    session = Session("a", tokens(1, 20), replace(GREEDY, num_prompt_tokens=20))
    draft = drafter(tokens(1, 20), 200, 0)
    generate_serial(target, draft, session, 50, 0)
    pool.give(place)
    generate_serial(target, draft, session, 30, 0)
    assert not runner.kept
    generate_serial(target, draft, session, 40, 0)
    assert list(map(len, runner.kept.values())) == [128]


def test_long_prompts_leave_spare_ones_which_go_first() -> None:
    target, runner = state_target(
        num_snapshots=3, max_model_len=16384, max_num_batched_tokens=16384, num_blocks=2048
    )
    first_token(target, "a", tokens(1, 2 * SPARE_TOKENS + 100))
    assert sorted(map(len, runner.kept.values())) == [SPARE_TOKENS, 2 * SPARE_TOKENS, 2 * SPARE_TOKENS + 64]
    first_token(target, "b", tokens(2, 100))
    first_token(target, "c", tokens(3, 100))
    assert sorted(map(len, runner.kept.values())) == [64, 64, 2 * SPARE_TOKENS + 64]
    assert (target.info.num_snapshots_held, target.info.num_snapshots_evicted) == (3, 2)


def test_the_one_that_saves_the_fewest_tokens_goes_first_and_what_is_old_saves_less() -> None:
    index = PrefixIndex(16)
    pool = Snapshots(2, index)

    def path_of(letter: int, count: int) -> list[bytes | None]:
        path: list[bytes | None] = [bytes([letter, number]) for number in range(count)]
        for name in path:
            assert name is not None
            if index.holder(name) is None:
                index.add(letter, name)
        return path

    def leave(letter: int, count: int) -> bool:
        place = pool.take(count * STATE_UNIT)
        if place is not None:
            pool.add(place, path_of(letter, count))
        return place is not None

    assert leave(1, 8) and leave(2, 2)
    assert not leave(3, 1), "all others save more"
    assert leave(4, 3) and pool.find(path_of(2, 2)) is None
    # The clock is at 128, what comes now is worth 320; then at 320, and three units are worth 512, too.
    assert leave(5, 3) and pool.find(path_of(4, 3)) is None
    assert leave(6, 6) and pool.find(path_of(1, 8)) is None, "it was not found for long"


def test_what_lies_behind_one_that_goes_saves_more() -> None:
    index = PrefixIndex(16)
    pool = Snapshots(3, index)
    path: list[bytes | None] = [bytes([number]) for number in range(9)]
    for name in path:
        assert name is not None
        index.add(0, name)
    deep = pool.add(pool.take(0) or 0, path)
    assert deep.num_saved == 9 * STATE_UNIT
    place = pool.take(0)
    assert place is not None
    middle = pool.add(place, path[:4])
    assert (middle.num_saved, deep.num_saved) == (4 * STATE_UNIT, 5 * STATE_UNIT)
    pool.give(pool.remove(middle))
    assert deep.num_saved == 9 * STATE_UNIT
    index.truncate(0, 0)
    assert pool.take(64) is not None and pool.take(64) is not None
    assert pool.take(1) == deep.index, "without keys and values it is of no use"


@dataclass
class Going:
    """A request of the random test."""

    session: Session
    prompt: list[int]
    verified: tuple[VerifyItem, Verdict] | None = None
    drafted: DraftTokens = field(default_factory=lambda: NO_DRAFT)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_happens_states_have_seen_what_keys_and_values_are_of(data: st.DataObject) -> None:
    """Prompts that share their beginnings, few snapshots, chunks, refused drafts, repeats, failures."""
    block_size = data.draw(st.sampled_from([16, 32, 40, 512]))
    target, runner = state_target(
        num_snapshots=data.draw(st.integers(1, 5)), block_size=block_size, num_blocks=3072 // block_size
    )
    going: list[Going] = []
    for number in range(data.draw(st.integers(6, 25))):
        kind = data.draw(st.sampled_from(["new", "step", "step", "step", "end", "again", "fail"]))
        if kind == "new" and len(going) < 3:
            cut = data.draw(st.sampled_from([0, 70, 130, 200]))
            prompt = [*tokens(1, cut), *tokens(data.draw(st.integers(2, 4)), data.draw(st.integers(1, 150)))]
            sampling = replace(GREEDY, num_prompt_tokens=len(prompt), message_borders=(cut,))
            going.append(Going(Session(str(number), list(prompt), sampling), prompt))
        elif going and kind != "new":
            one = going[data.draw(st.integers(0, len(going) - 1))]
            turn(target, runner, one, kind, data)
            if kind == "end":
                target.release([one.session.request_id])
                going.remove(one)
        target.check_integrity()


def turn(target: TargetEngine, runner: StateRunner, one: Going, kind: str, data: st.DataObject) -> None:
    session, prompt = one.session, one.prompt
    missing = len(session.token_ids) - session.target_len
    if kind == "again" and one.verified is not None:
        # The answer was lost: the item comes once more.
        item, before = one.verified
        [reply] = target.verify([item]).replies
        assert isinstance(reply, Verdict)
        assert replace(reply, num_cached_tokens=0) == replace(before, num_cached_tokens=0)
        return
    if missing > 20 and data.draw(st.booleans()):
        start = session.target_len
        end = len(session.token_ids) - 1
        most = data.draw(st.integers(1, 200))
        chunk = VerifyItem(
            session.request_id,
            0,
            start,
            tuple(session.token_ids[start:end]),
            sample=False,
            sampling=session.sampling if start == 0 else None,
            max_new_tokens=most,
        )
        [reply] = target.verify([chunk]).replies
        assert isinstance(reply, Verdict) and reply.held_len is not None, reply
        session.target_len, one.verified = reply.held_len, None
        return
    drafted = drafter(prompt, len(session.token_ids), data.draw(st.integers(0, 4)))(session, 4)
    if kind == "fail":
        runner.fails = True
        item = replace(verify_item(session, drafted), round_id=0)
        with pytest.raises(ZeroDivisionError):
            target.verify([item])
        return
    item = verify_item(session, drafted)
    [reply] = target.verify([item]).replies
    assert isinstance(reply, Verdict), reply
    one.verified = item, reply
    commit(session, drafted, reply)
    output = session.token_ids[len(prompt) :]
    assert output == expected(prompt, len(output))
