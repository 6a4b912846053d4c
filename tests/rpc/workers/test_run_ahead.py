"""Steps ahead: what is computed before it is asked for, when it is used, and that no answer changes by it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specray.draft_tokens import DraftTokens
from specray.fakes import FakeTarget
from specray.rpc.codec.values import RequestBatch
from specray.rpc.role import TARGET, bind_target
from specray.rpc.workers.engine_host import EngineHost
from specray.rpc.workers.run_ahead import RunAhead
from specray.types import SamplingParams, TargetReplies, Verdict, VerifyItem
from tests.rpc.workers.harness import ScriptedStream

PROMPT = (1, 2, 3)
GREEDY = SamplingParams(temperature=0.0, num_prompt_tokens=len(PROMPT))


class Target(FakeTarget):
    """Notes its calls; each step takes a nanosecond for each of its rows."""

    def __init__(self) -> None:
        super().__init__(cost=lambda rows: rows)
        self.calls: list[tuple[VerifyItem, ...]] = []
        self.is_broken = self.is_lost = False
        self.most_calls = 1000

    def check(self) -> None:
        if self.is_lost:
            raise RuntimeError("lost")

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        if self.is_broken or len(self.calls) == self.most_calls:
            raise RuntimeError("broken")
        self.calls.append(tuple(items))
        return replace(super().verify(items), num_experts=100 + len(self.calls))


def first(request_id: str = "a", *, runs_on: bool = True, sampling: SamplingParams = GREEDY) -> VerifyItem:
    return VerifyItem(request_id, 1, 0, PROMPT, sampling=sampling, runs_on=runs_on)


def following(item: VerifyItem, replies: TargetReplies, **changes: Any) -> VerifyItem:
    """The plain step after an item."""
    [verdict] = [reply for reply in replies.replies if reply.request_id == item.request_id]
    assert isinstance(verdict, Verdict) and verdict.next_token_id is not None
    length = item.base_len + len(item.token_ids) + verdict.num_accepted_tokens
    plain = VerifyItem(item.request_id, item.round_id + 1, length, (verdict.next_token_id,), runs_on=True)
    return replace(plain, **changes)


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def ahead(target: Target) -> RunAhead:
    return RunAhead(bind_target(target))


def alone(*items: VerifyItem) -> TargetReplies:
    """The last item's replies by a target that computes what it is asked, and nothing else."""
    target = FakeTarget()
    return [target.verify([item]) for item in items][-1]


def test_the_step_that_is_asked_for_was_computed_before(target: Target, ahead: RunAhead) -> None:
    item = first()
    replies = ahead.run([item])
    assert ahead.advance() is True
    assert len(target.calls) == 2
    # The number of its round is whatever the Router counts.
    second = following(item, replies, round_id=9)
    answer = ahead.run([second])
    assert len(target.calls) == 2
    assert answer.replies == alone(item, second).replies
    assert (answer.forward_ns, answer.num_rows, answer.num_experts) == (1, 1, 102)
    assert ahead.advance() is True and len(target.calls) == 3


def test_experts_are_not_told_of_a_step_that_is_half_an_earlier_one(target: Target, ahead: RunAhead) -> None:
    items = [first("a"), first("b")]
    replies = ahead.run(items)
    assert replies.num_experts == 101
    assert ahead.advance() is True
    mixed = [following(items[0], replies), following(items[1], replies, draft=DraftTokens((5,)))]
    assert ahead.run(mixed).num_experts is None


@pytest.mark.parametrize(
    "changes",
    [
        {"draft": DraftTokens((5, 6))},
        {"base_len": 2, "token_ids": (3, 7)},
        {"token_ids": (63,)},
        {"num_next_draft_tokens": 2},
        {"sample": False},
    ],
)
def test_any_other_item_is_computed_as_if_nothing_had_been(
    target: Target, ahead: RunAhead, changes: dict[str, Any]
) -> None:
    item = first()
    replies = ahead.run([item])
    assert ahead.advance() is True
    other = following(item, replies, **changes)
    assert ahead.run([other]).replies == alone(item, other).replies
    assert target.calls[-1] == (other,)
    # What was stored is gone: it is not the answer to a later item.
    again = following(item, replies)
    assert ahead.run([again]).replies == alone(item, again).replies
    assert target.calls[-1] == (again,)


def test_nothing_is_expected_after_what_does_not_run_on(target: Target, ahead: RunAhead) -> None:
    item = first(runs_on=False)
    replies = ahead.run([item])
    assert ahead.advance() is False
    # A prompt's chunk in the same step: its next one is part of the next step.
    ahead.run([following(item, replies), VerifyItem("b", 1, 0, PROMPT, sample=False, sampling=GREEDY)])
    assert ahead.advance() is False
    assert len(target.calls) == 2


def test_nothing_is_computed_after_a_stop_token(ahead: RunAhead) -> None:
    drawn = alone(first()).replies[0]
    assert isinstance(drawn, Verdict) and drawn.next_token_id is not None
    ahead.run([first(sampling=replace(GREEDY, stop_token_ids=(drawn.next_token_id,)))])
    assert ahead.advance() is False


def test_sequences_of_one_step_stay_one_step(target: Target, ahead: RunAhead) -> None:
    items = [first("a"), first("b")]
    replies = ahead.run(items)
    assert ahead.advance() is True
    a, b = (following(item, replies) for item in items)
    answer = ahead.run([a])
    # The rows of the step are reported once.
    assert (answer.forward_ns, answer.num_rows) == (2, 2)
    assert ahead.advance() is False
    answer = ahead.run([b])
    assert (answer.forward_ns, answer.num_rows) == (0, 0)  # reported before
    assert ahead.advance() is True
    assert [[item.request_id for item in call] for call in target.calls] == [["a", "b"]] * 3


def test_what_joins_a_step_is_computed_with_it(target: Target, ahead: RunAhead) -> None:
    item = first("a")
    replies = ahead.run([item])
    ahead.advance()
    answer = ahead.run([following(item, replies), first("b")])
    assert [reply.request_id for reply in answer.replies] == ["a", "b"]
    assert target.calls[-1] == (first("b"),)
    # Of the step that was waited for, not of both.
    assert (answer.forward_ns, answer.num_rows) == (len(PROMPT), len(PROMPT))
    assert ahead.advance() is True
    assert [item.request_id for item in target.calls[-1]] == ["a", "b"]


def test_released_sequences_are_forgotten(target: Target, ahead: RunAhead) -> None:
    items = [first("a"), first("b")]
    ahead.run(items)
    ahead.advance()
    ahead.release(["a"])
    assert target.held_request_ids == {"b"}
    ahead.release(["b"])
    # Verdicts that nobody will ask for hold nobody up.
    ahead.run([first("c")])
    assert ahead.advance() is True
    ahead.release(["c"])
    ahead.run([first("a")])
    ahead.release(["a"])
    assert ahead.advance() is False


def test_a_step_ahead_that_fails_for_one_sequence_is_asked_for_anew(target: Target, ahead: RunAhead) -> None:
    item = first()
    replies = ahead.run([item])
    target.fail_next("a", "no room", is_retriable=True)
    assert ahead.advance() is True
    second = following(item, replies)
    assert ahead.run([second]).replies == alone(item, second).replies


def test_what_failed_ahead_is_computed_when_it_is_asked_for(target: Target, ahead: RunAhead) -> None:
    item = first()
    replies = ahead.run([item])
    target.is_broken = True
    with pytest.raises(RuntimeError, match=r"^broken$"):
        ahead.advance()
    target.is_broken = False
    assert ahead.advance() is False
    second = following(item, replies)
    assert ahead.run([second]).replies == alone(item, second).replies
    assert ahead.advance() is True


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_step_ahead_that_fails_breaks_the_engine_only_if_its_check_fails(is_lost: bool) -> None:
    target, stream, broken = Target(), ScriptedStream(), []
    host = EngineHost(TARGET, lambda: RunAhead(bind_target(target)).bound(), on_broken=broken.append)
    host.start()
    target.most_calls, target.is_lost = 1, is_lost
    host.submit(stream, RequestBatch((first(),), ()))
    await asyncio.wait_for(stream.has_got.wait(), 5.0)
    await asyncio.sleep(0)
    assert [str(error) for error in broken] == (["the target engine is broken: RuntimeError"] * is_lost)
    host.stop()


@pytest.mark.slow
@settings(deadline=None)
@given(st.data())
def test_answers_are_those_of_a_target_that_never_goes_ahead(data: st.DataObject) -> None:
    """Items of three sequences in any order: plain, with draft tokens, taken back, sent anew, released."""
    target = Target()
    ahead, reference = RunAhead(bind_target(target)), FakeTarget()
    tokens: dict[str, list[int]] = {}
    for round_id in range(data.draw(st.integers(1, 12))):
        items = []
        for request_id in data.draw(st.lists(st.sampled_from("abc"), unique=True, min_size=1)):
            sent = tokens.get(request_id)
            runs_on, draft = data.draw(st.booleans()), data.draw(st.sampled_from([(), (), (1, 2)]))
            if sent is None:
                item = first(request_id)
                tokens[request_id] = [*PROMPT]
            else:
                base = data.draw(st.sampled_from([len(sent) - 1, len(sent) - 1, max(1, len(sent) - 3)]))
                item = VerifyItem(request_id, round_id, base, tuple(sent[base:]), DraftTokens(draft))
            items.append(replace(item, round_id=round_id, runs_on=runs_on))
        found, expected = ahead.run(items), reference.verify(items)
        assert found.replies == expected.replies
        for reply in expected.replies:
            if isinstance(reply, Verdict) and reply.next_token_id is not None:
                own = {item.request_id: item for item in items}[reply.request_id]
                kept = own.draft.token_ids[: reply.num_accepted_tokens]
                sent = [*tokens[reply.request_id][: own.base_len], *own.token_ids, *kept]
                tokens[reply.request_id] = [*sent, reply.next_token_id]
        if data.draw(st.booleans()):
            ahead.advance()
        if data.draw(st.integers(0, 5)) == 0:
            gone = data.draw(st.sampled_from("abc"))
            tokens.pop(gone, None)
            ahead.release([gone])
            reference.release([gone])


async def test_a_host_goes_ahead_when_replies_have_left_and_nothing_waits() -> None:
    target, stream, seen = Target(), ScriptedStream(), []
    host = EngineHost(TARGET, lambda: RunAhead(bind_target(target)).bound(), on_broken=lambda error: None)
    host.start()

    async def write() -> None:
        await stream.has_got.wait()
        seen.append(len(target.calls))

    writer = asyncio.create_task(write())
    await asyncio.sleep(0)
    item = first()
    host.submit(stream, RequestBatch((item,), ()))
    await asyncio.wait_for(writer, 5.0)
    assert seen == [1]
    await asyncio.sleep(0)
    assert len(target.calls) == 2
    # Two requests at once: the second is no step ahead.
    host.submit(stream, RequestBatch((following(item, stream.got[0]),), ()))
    host.submit(stream, RequestBatch((first("b", runs_on=False),), ()))
    await host.check()
    assert [len(call) for call in target.calls] == [1, 1, 1]
    host.stop()
