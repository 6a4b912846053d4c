"""Fairness between tenants and order by priority: bounds from theory, and a state machine beside a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specray.errors import OverloadedError
from specray.router.admission.fair import MAX_IDLE_TENANTS, FairQueue
from specray.router.admission.queue import AdmissionQueue


@dataclass(frozen=True)
class Entry:
    request_id: str
    tenant: str = ""
    priority: int = 0
    num_queued_tokens: int = 10
    num_expected_tokens: int = 100


def names(entries: list[Entry]) -> list[str]:
    return [entry.request_id for entry in entries]


def filled(*entries: Entry, max_requests: int = 4, max_tokens: int = 10_000) -> AdmissionQueue[Entry]:
    queue: AdmissionQueue[Entry] = AdmissionQueue(max_requests=max_requests, max_tokens=max_tokens)
    for entry in entries:
        assert queue.push(entry, num_free_places=0) == []
    return queue


def flood(tenant: str, count: int, **fields: int) -> list[Entry]:
    return [Entry(f"{tenant}{index}", tenant, **fields) for index in range(count)]


def served(queue: AdmissionQueue[Entry]) -> list[str]:
    order = []
    while queue:
        order.append(queue.pop().request_id)
    return order


# Order


def test_lower_priority_goes_first_and_within_one_first_come_first_served() -> None:
    queue = filled(Entry("a"), Entry("b", priority=5), Entry("c", priority=-1), Entry("d"))
    assert served(queue) == ["c", "a", "d", "b"]


def test_newcomer_is_next_however_many_another_tenant_has_waiting() -> None:
    queue = filled(*flood("many", 1000), max_requests=2000)
    assert names([queue.pop(), queue.pop()]) == ["many0", "many1"]
    queue.push(Entry("one", "few"), num_free_places=0)
    assert names([queue.pop(), queue.pop()]) == ["one", "many2"]


def test_tenants_get_equal_tokens_not_equal_requests() -> None:
    queue = filled(
        *flood("small", 8, num_expected_tokens=10),
        *flood("large", 4, num_expected_tokens=40),
        max_requests=20,
    )
    assert Counter(name[:5] for name in served(queue)[:5]) == {"small": 4, "large": 1}


def test_tenant_whose_request_ended_early_is_charged_what_it_took() -> None:
    queue = filled(*flood("a", 3), *flood("b", 3), max_requests=6)
    entries = [queue.pop(), queue.pop()]
    assert names(entries) == ["a0", "b0"]
    queue.settle(entries[1], 10)
    assert queue.pop().request_id == "b1"


@pytest.mark.slow
@given(
    pushed=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.integers(1, 9)), max_size=30),
    num_taken=st.integers(0, 30),
)
def test_what_waits_is_listed_in_the_order_in_which_it_is_taken(
    pushed: list[tuple[str, int, int]], num_taken: int
) -> None:
    queue = filled(max_requests=100)
    for index, (tenant, priority, cost) in enumerate(pushed):
        queue.push(Entry(str(index), tenant, priority, 10, cost), num_free_places=0)
        if index < num_taken and index % 2:
            queue.pop()
    assert names(list(queue)) == served(queue)


def test_leaving_the_queue_between_two_requests_wins_nothing() -> None:
    """A tenant that always sends its next request when its last was taken must not starve another."""
    queue = filled(*flood("patient", 10), max_requests=20)
    order = []
    for index in range(8):
        queue.push(Entry(f"eager{index}", "eager"), num_free_places=0)
        order.append(queue.pop().tenant)
        if order[-1] == "patient":
            queue.remove(f"eager{index}")
    assert Counter(order) == {"patient": 4, "eager": 4}


def test_idle_tenant_is_forgotten_when_too_many_are_remembered() -> None:
    fair: FairQueue[Entry] = FairQueue()
    fair.push(Entry("waits", "waiting"))
    for index in range(MAX_IDLE_TENANTS + 50):
        fair.push(Entry(str(index), f"tenant{index}", num_expected_tokens=0))
        fair.push(Entry(f"gone{index}", f"gone{index}"))
        fair.remove(Entry(f"gone{index}", f"gone{index}"))
    assert len(fair.idle_tags) <= MAX_IDLE_TENANTS


@pytest.mark.slow
@given(
    costs=st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=5, max_size=60),
    num_taken=st.integers(1, 40),
)
def test_two_tenants_that_wait_all_the_time_differ_by_at_most_one_request_each(
    costs: list[tuple[int, int]], num_taken: int
) -> None:
    """Theorem 1 of start-time fair queueing: |W_a - W_b| <= max cost of a + max cost of b."""
    queue = filled(max_requests=1000)
    for index, pair in enumerate(costs):
        for tenant, cost in zip("ab", pair, strict=True):
            queue.push(Entry(f"{tenant}{index}", tenant, 0, 10, cost), num_free_places=0)
    work = Counter({"a": 0, "b": 0})
    waiting = Counter({"a": len(costs), "b": len(costs)})
    most = max(pair[0] for pair in costs) + max(pair[1] for pair in costs)
    for _ in range(num_taken):
        if not (waiting["a"] and waiting["b"]):
            return
        entry = queue.pop()
        work[entry.tenant] += entry.num_expected_tokens
        waiting[entry.tenant] -= 1
        assert abs(work["a"] - work["b"]) <= most


# A full queue


def test_full_queue_makes_room_for_a_tenant_that_has_less_and_keeps_its_oldest() -> None:
    queue = filled(*flood("many", 4))
    assert names(queue.push(Entry("one", "few"), num_free_places=0)) == ["many3"]
    assert names(queue.push(Entry("two", "few"), num_free_places=0)) == ["many2"]
    with pytest.raises(OverloadedError, match="4 requests wait; allowed: 4"):
        queue.push(Entry("three", "few"), num_free_places=0)
    with pytest.raises(OverloadedError):
        queue.push(Entry("again", "many"), num_free_places=0)
    assert sorted(entry.request_id for entry in queue) == ["many0", "many1", "one", "two"]


def test_full_queue_makes_room_for_what_is_more_urgent_never_for_what_is_less() -> None:
    queue = filled(*flood("a", 2), *flood("b", 2, priority=3))
    assert names(queue.push(Entry("urgent", "a"), num_free_places=0)) == ["b1"]
    with pytest.raises(OverloadedError):
        queue.push(Entry("late", "c", priority=4), num_free_places=0)


def test_long_prompt_displaces_as_many_as_it_needs_or_none() -> None:
    queue = filled(*flood("many", 10), max_requests=20, max_tokens=100)
    with pytest.raises(OverloadedError, match="100 prompt tokens wait; allowed: 100"):
        queue.push(Entry("huge", "few", num_queued_tokens=60), num_free_places=0)
    assert (len(queue), queue.num_tokens) == (10, 100)
    assert names(queue.push(Entry("long", "few", num_queued_tokens=45), num_free_places=0)) == [
        f"many{index}" for index in (9, 8, 7, 6, 5)
    ]
    assert queue.num_tokens == 95


def test_request_that_was_let_in_once_is_never_displaced() -> None:
    queue = filled(*flood("many", 1), max_requests=2)
    queue.push_front(Entry("preempted", "many", priority=9))
    with pytest.raises(OverloadedError):
        queue.push(Entry("new", "few"), num_free_places=0)
    assert served(queue) == ["preempted", "many0"]


class QueueMachine(RuleBasedStateMachine):
    """Random traffic against a model that is a plain list, newest last."""

    MAX_REQUESTS = 6
    MAX_TOKENS = 60

    def __init__(self) -> None:
        super().__init__()
        self.queue: AdmissionQueue[Entry] = AdmissionQueue(
            max_requests=self.MAX_REQUESTS, max_tokens=self.MAX_TOKENS
        )
        self.model: list[Entry] = []
        self.returned: list[Entry] = []
        self.num_made = 0

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.integers(0, 1),
        tokens=st.integers(1, 40),
        num_free_places=st.integers(0, 3),
    )
    def push(self, tenant: str, priority: int, tokens: int, num_free_places: int) -> None:
        self.num_made += 1
        entry = Entry(str(self.num_made), tenant, priority, tokens, tokens + 20)
        before = list(self.queue)
        try:
            displaced = self.queue.push(entry, num_free_places=num_free_places)
        except OverloadedError:
            assert list(self.queue) == before
            self.check_refusal(entry, num_free_places)
            return
        for victim in displaced:
            self.check_victim(victim, entry)
            self.model.remove(victim)
        self.model.append(entry)
        assert len(self.queue) <= self.MAX_REQUESTS + num_free_places
        waiting = [other for other in before if other not in displaced][num_free_places:]
        if waiting:
            assert self.tokens([*waiting, entry]) <= self.MAX_TOKENS

    def check_victim(self, victim: Entry, entry: Entry) -> None:
        rivals = [e for e in self.model if (e.tenant, e.priority) == (victim.tenant, victim.priority)]
        assert rivals[-1] is victim, "the newest of its line goes"
        assert victim.priority == max(e.priority for e in self.model), "the least urgent go first"
        assert victim.priority >= entry.priority
        if victim.priority == entry.priority:
            own = [e for e in self.model if (e.tenant, e.priority) == (entry.tenant, entry.priority)]
            assert len(rivals) > len(own) or self.tokens(rivals) > self.tokens(own)

    def check_refusal(self, entry: Entry, num_free_places: int) -> None:
        """Whoever has nothing waiting is only refused when nobody is less urgent and has two requests."""
        assert len(self.queue) > num_free_places
        if self.queue.num_tokens + entry.num_queued_tokens > self.MAX_TOKENS:
            return
        assert all(e.priority <= entry.priority for e in self.model)
        held = Counter(e.tenant for e in self.model if e.priority == entry.priority)
        assert all(held[name] <= held[entry.tenant] + 1 for name in held if name != entry.tenant)

    @staticmethod
    def tokens(entries: list[Entry]) -> int:
        return sum(entry.num_queued_tokens for entry in entries)

    @precondition(lambda self: self.model or self.returned)
    @rule(is_preempted=st.booleans())
    def pop(self, is_preempted: bool) -> None:
        entry = self.queue.pop()
        if self.returned:
            assert entry is self.returned.pop()
        else:
            assert entry.priority == min(e.priority for e in self.model)
            line = [e for e in self.model if (e.tenant, e.priority) == (entry.tenant, entry.priority)]
            assert entry is line[0]
            self.model.remove(entry)
        if is_preempted:
            self.queue.push_front(entry)
            self.returned.append(entry)
        else:
            self.queue.settle(entry, entry.num_queued_tokens + 1)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.model))
        assert self.queue.remove(entry.request_id) is entry
        self.model.remove(entry)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert {e.request_id for e in self.queue} == {e.request_id for e in self.model + self.returned}
        assert len(self.queue) == len(self.model) + len(self.returned)
        assert self.queue.num_tokens == self.tokens(self.model + self.returned)
        for fair in self.queue.classes.values():
            assert all(line.entries for line in fair.lines.values())
            assert all(
                line.num_tokens == self.tokens([*line.entries.values()]) for line in fair.lines.values()
            )


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase
