"""Admission: bounds, order and the advice to those refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from specray.errors import OverloadedError
from specray.router.admission.queue import AdmissionQueue


@dataclass(frozen=True)
class Entry:
    request_id: str
    num_queued_tokens: int = 10
    tenant: str = ""
    priority: int = 0
    num_expected_tokens: int = 20


def new_queue(max_requests: int = 2, max_tokens: int = 100) -> AdmissionQueue[Entry]:
    return AdmissionQueue(max_requests=max_requests, max_tokens=max_tokens)


def test_first_in_first_out() -> None:
    queue = new_queue()
    for name in "ab":
        queue.push(Entry(name), num_free_places=0)
    assert [queue.pop().request_id, queue.pop().request_id] == ["a", "b"]
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_one_request_too_many_is_refused_and_changes_nothing() -> None:
    queue = new_queue()
    for name in "ab":
        queue.push(Entry(name), num_free_places=0)
    with pytest.raises(OverloadedError, match="2 requests wait; allowed: 2"):
        queue.push(Entry("c"), num_free_places=0)
    assert [entry.request_id for entry in queue] == ["a", "b"]
    assert queue.num_tokens == 20


def test_free_places_do_not_count_as_waiting() -> None:
    queue = new_queue(max_requests=0)
    queue.push(Entry("a"), num_free_places=1)
    with pytest.raises(OverloadedError):
        queue.push(Entry("b"), num_free_places=1)


def test_tokens_are_bounded_but_one_request_alone_is_let_in() -> None:
    queue = new_queue(max_tokens=100)
    queue.push(Entry("long", 150), num_free_places=0)
    with pytest.raises(OverloadedError, match="150 prompt tokens wait; allowed: 100"):
        queue.push(Entry("short", 1), num_free_places=0)
    queue.pop()
    queue.push(Entry("a", 60), num_free_places=0)
    queue.push(Entry("b", 40), num_free_places=0)
    assert queue.num_tokens == 100


def test_tokens_of_those_that_find_a_free_place_are_not_bounded() -> None:
    queue = new_queue(max_requests=9, max_tokens=100)
    for name in "abc":
        queue.push(Entry(name, 90), num_free_places=3)
    queue.push(Entry("alone", 150), num_free_places=3)
    with pytest.raises(OverloadedError, match="420 prompt tokens wait; allowed: 100"):
        queue.push(Entry("short", 1), num_free_places=3)
    queue.remove("alone")
    queue.push(Entry("d", 60), num_free_places=3)
    queue.push(Entry("e", 40), num_free_places=3)
    with pytest.raises(OverloadedError):
        queue.push(Entry("short", 1), num_free_places=3)
    queue.push(Entry("f", 60), num_free_places=4)
    assert [entry.request_id for entry in queue] == ["a", "b", "c", "d", "e", "f"]


def test_free_places_are_for_those_whose_turn_it_is() -> None:
    queue = new_queue(max_requests=9, max_tokens=100)
    queue.push(Entry("a0", 90, "a"), num_free_places=2)
    queue.push(Entry("a1", 90, "a"), num_free_places=2)
    # The places are for a0 and b0: a1 waits, with 90 tokens.
    assert queue.push(Entry("b0", 10, "b"), num_free_places=2) == []
    assert [entry.request_id for entry in queue] == ["a0", "b0", "a1"]
    queue.push(Entry("b1", 10, "b"), num_free_places=2)
    with pytest.raises(OverloadedError):
        queue.push(Entry("b2", 81, "b"), num_free_places=2)
    # It takes the place of a1, which has the most.
    assert queue.push(Entry("c", 11, "c"), num_free_places=2) == [Entry("a1", 90, "a")]


def test_place_of_a_displaced_request_is_the_next_ones() -> None:
    queue = new_queue(max_requests=9, max_tokens=100)
    queue.push(Entry("b", 10, "b", num_expected_tokens=1000), num_free_places=9)
    queue.push(Entry("a0", 150, "a"), num_free_places=9)
    assert queue.pop().request_id == "b"
    # What b has had lets both of a go first.
    for entry in (Entry("a1", 200, "a"), *(Entry(f"b{index}", 60, "b") for index in range(4))):
        queue.push(entry, num_free_places=9)
    displaced = queue.push(Entry("c", 10, "c"), num_free_places=2)
    assert [entry.request_id for entry in displaced] == ["a1", "b3", "b2"]
    # Two have places, and 70 tokens wait.
    assert {entry.request_id for entry in queue} == {"a0", "b0", "b1", "c"}


def test_a_request_that_was_put_back_goes_first_beyond_all_bounds() -> None:
    queue = new_queue(max_requests=1)
    queue.push(Entry("waiting"), num_free_places=0)
    queue.push_front(Entry("preempted"))
    assert [entry.request_id for entry in queue] == ["preempted", "waiting"]


def test_removed_request_leaves_its_tokens() -> None:
    queue = new_queue()
    queue.push(Entry("a"), num_free_places=0)
    assert queue.remove("a") == Entry("a")
    assert queue.remove("a") is None
    assert queue.num_tokens == 0


def test_retry_after_follows_the_pace_of_service_within_bounds() -> None:
    queue = new_queue(max_requests=50)
    assert queue.retry_after_s() == 1.0
    for index in range(10):
        queue.push(Entry(str(index)), num_free_places=0)
    queue.observe_service(2.0)
    assert queue.retry_after_s() == 20.0
    queue.observe_service(1000.0)
    assert queue.retry_after_s() == 60.0
