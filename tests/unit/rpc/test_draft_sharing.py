"""Sharing of one engine by several streams: turns, names, places and time, without gRPC."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specray.draft_tokens import DraftTokens
from specray.rpc.codec.values import RequestBatch
from specray.rpc.role import DRAFT, TARGET
from specray.rpc.workers.busy import BusyMeter
from specray.rpc.workers.item_queue import ItemQueue
from specray.rpc.workers.sequence_names import SequenceNames
from specray.types import DraftReplies, SpeculateItem, VerifyItem

Queue = ItemQueue[SpeculateItem, DraftReplies]


class Stream:
    """A stream; two are never equal."""

    is_open = True

    def deliver(self, replies: DraftReplies | None, num_requests: int) -> None:
        raise AssertionError("nothing is delivered here")


def item(name: str, num_tokens: int = 1) -> SpeculateItem:
    return SpeculateItem(name, 0, 0, tuple(range(num_tokens)), 0)


def request(*items: SpeculateItem, releases: tuple[str, ...] = ()) -> RequestBatch[SpeculateItem]:
    return RequestBatch(items, releases)


def taken(queue: Queue, budget: int) -> list[str]:
    return [
        name
        for portion in queue.take(budget)
        for name in (*(f"-{gone}" for gone in portion.batch.release_request_ids), *_names(portion.batch))
    ]


def _names(batch: RequestBatch[SpeculateItem]) -> Iterator[str]:
    return (item.request_id for item in batch.items)


@pytest.fixture
def queue() -> Queue:
    return ItemQueue(DRAFT.num_tokens)


def test_streams_take_turns_item_by_item(queue: Queue) -> None:
    one, two = Stream(), Stream()
    queue.put(one, request(item("a"), item("b"), item("c")))
    queue.put(two, request(item("x")))
    queue.put(two, request(item("y")))
    assert taken(queue, 100) == ["a", "x", "b", "y", "c"]
    assert not queue


def test_who_sends_little_waits_for_one_call_of_who_sends_much(
    queue: Queue,
) -> None:
    greedy, modest = Stream(), Stream()
    queue.put(greedy, request(*(item(f"g{i}", 10) for i in range(9))))
    assert taken(queue, 20) == ["g0", "g1"]
    queue.put(modest, request(item("m")))
    assert taken(queue, 20) == ["g2", "m"]
    assert taken(queue, 20) == ["g3", "g4"]


def test_turns_go_on_where_the_last_call_ended(queue: Queue) -> None:
    one, two, three = Stream(), Stream(), Stream()
    for stream, name in ((one, "a"), (two, "b"), (three, "c")):
        queue.put(stream, request(item(f"{name}0", 5), item(f"{name}1", 5)))
    assert [taken(queue, 10) for _ in range(3)] == [["a0", "b0"], ["c0", "a1"], ["b1", "c1"]]


def test_item_beyond_the_budget_goes_alone(queue: Queue) -> None:
    one, two = Stream(), Stream()
    queue.put(one, request(item("big", 50)))
    queue.put(two, request(item("small")))
    assert [taken(queue, 20) for _ in range(2)] == [["big"], ["small"]]


def test_releases_stay_in_order_and_a_request_ends_with_its_last_item(
    queue: Queue,
) -> None:
    one = Stream()
    queue.put(one, request(item("a", 9), item("b", 9), releases=("old",)))
    queue.put(one, request(releases=("a",)))
    first = queue.take(10)
    assert [(portion.batch.release_request_ids, portion.is_last) for portion in first] == [(("old",), False)]
    assert len(queue) == 2
    second = queue.take(10)
    assert [(portion.batch.release_request_ids, portion.is_last) for portion in second] == [
        ((), True),
        (("a",), True),
    ]


def test_dropped_stream_leaves_the_others_their_turns(queue: Queue) -> None:
    one, two = Stream(), Stream()
    queue.put(one, request(item("a")))
    queue.put(two, request(item("b")))
    queue.drop(one)
    queue.drop(one)
    assert taken(queue, 10) == ["b"]


def test_cost_of_an_item_counts_what_is_to_be_drafted() -> None:
    assert DRAFT.num_tokens(SpeculateItem("a", 0, 0, (1, 2, 3), 4)) == 7
    assert DRAFT.num_tokens(SpeculateItem("a", 0, 0, (1,), 3, (5, 6), (2, 2, 1))) == 1 + 2 + 15
    assert DRAFT.num_tokens(SpeculateItem("a", 0, 0, (1,), 3, (5, 6), (2, 2, 1), None, 2)) == 1 + 2 + 6
    assert TARGET.num_tokens(VerifyItem("a", 0, 0, (1, 2), DraftTokens((3,)))) == 3


def test_equal_request_ids_of_two_streams_are_two_sequences_of_a_shared_engine() -> None:
    names: SequenceNames[str] = SequenceNames(is_shared=True)
    assert [names.add("one", "a"), names.add("two", "a"), names.add("two", "a~1")] == ["a", "a~1", "a~1~2"]
    assert (names.use("one", "a"), names.use("two", "a"), names.use("three", "a")) == ("a", "a~1", None)
    names.remove("one", ["a", "never"])
    assert names.use("one", "a") is None
    assert names.use("two", "a") == "a~1"
    assert sorted(names.remove_stream("two")) == ["a~1", "a~1~2"]
    assert len(names) == 0


def test_second_stream_takes_over_what_is_not_shared() -> None:
    names: SequenceNames[str] = SequenceNames(is_shared=False)
    names.add("old", "a")
    assert names.add("new", "a") == "a"
    assert names.use("old", "a") is None
    assert names.remove_stream("old") == []
    assert names.of("new", ["a", "b"]) == ["a"]


def test_who_owns_most_gives_way_with_what_was_used_longest_ago() -> None:
    names: SequenceNames[str] = SequenceNames(is_shared=True)
    for number in range(4):
        names.add("greedy", f"g{number}")
    names.use("greedy", "g0")
    assert names.give_way("modest", needed={"g1"}) == ["g2"]
    names.add("modest", "m0")
    assert names.give_way("modest", needed=()) == ["g1"]
    names.add("modest", "m1")
    assert names.give_way("modest", needed=()) == []
    assert names.give_way("greedy", needed=()) == []


def test_nothing_gives_way_within_the_batch_being_computed() -> None:
    names: SequenceNames[str] = SequenceNames(is_shared=True)
    for number in range(3):
        names.add("greedy", f"g{number}")
    assert names.give_way("modest", needed={"g0", "g1", "g2"}) == []


def test_busy_share_follows_the_last_seconds() -> None:
    now = [0.0]
    meter = BusyMeter(lambda: now[0], window_s=10.0)
    assert (meter.share, meter.call_s) == (0.0, 0.0)
    meter.begin()
    now[0] = 3.0
    assert meter.call_s == 3.0
    now[0] = 100.0
    assert meter.share == pytest.approx(1.0, abs=1e-4)
    meter.end()
    assert meter.call_s == 0.0
    now[0] = 110.0
    assert meter.share == pytest.approx(0.3679, abs=1e-3)


def test_busy_share_of_regular_calls_is_their_share() -> None:
    now = [0.0]
    meter = BusyMeter(lambda: now[0])
    for _ in range(10_000):
        meter.begin()
        now[0] += 0.003
        meter.end()
        now[0] += 0.007
    assert meter.share == pytest.approx(0.3, abs=0.01)
