"""Which models are loaded: faults that routers of other servers had, and a state machine over a room."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specray.loading.table import Load, ModelEntry, ModelState, ModelTable, Room, Unload


def table(*names: str, room: float = 2.0, **options: object) -> ModelTable:
    """Models that take one byte each."""
    return ModelTable([ModelEntry(name=name, needs=Room(1.0), **options) for name in names], Room(room))  # type: ignore[arg-type]


def load(models: ModelTable, name: str, now: float) -> None:
    models.want(name, now)
    assert models.step(now) == Load(name)
    models.loaded(name, now)


def test_the_least_recently_used_model_leaves() -> None:
    models = table("a", "b", "c")
    load(models, "a", 1.0)
    load(models, "b", 2.0)
    models.observe("a", 0, 3.0)
    models.want("c", 4.0)
    assert models.step(4.0) == Unload("b")
    models.unloaded("b")
    assert models.step(4.0) == Load("c")


def test_the_least_urgent_model_leaves_before_the_least_recently_used() -> None:
    models = table("a", "b", "c")
    models["b"].priority = 1
    load(models, "a", 1.0)
    load(models, "b", 2.0)
    models.want("c", 4.0)
    assert models.step(4.0) == Unload("b")


def test_the_most_urgent_model_is_loaded_before_those_who_wait_longer() -> None:
    models = table("a", "b", "c", room=3.0)
    models["c"].priority = -1
    for now, name in enumerate("abc"):
        models.want(name, float(now))
    assert models.step(4.0) == Load("c")
    models.loaded("c", 5.0)
    assert models.step(5.0) == Load("a")


def test_the_most_that_a_model_was_seen_to_take_counts_unless_it_is_configured() -> None:
    models = table("a")
    seen = [models.measured("a", num_bytes) for num_bytes in (0.5, 0.25, 0.75)]
    assert (seen, models["a"].needs) == ([True, False, True], Room(0.75))
    fixed = table("a", has_fixed_needs=True)
    assert (fixed.measured("a", 0.5), fixed["a"].needs) == (False, Room(1.0))


def test_a_model_that_answers_stays_whatever_its_age() -> None:
    models = table("a", "b", "c")
    load(models, "a", 1.0)
    load(models, "b", 2.0)
    models.observe("a", 1, 1.0)
    models.want("c", 9.0)
    assert models.step(9.0) == Unload("b")


def test_where_all_are_used_a_load_waits_until_one_is_idle() -> None:
    models = table("a", "b", room=1.0)
    load(models, "a", 1.0)
    models.observe("a", 2, 1.0)
    models.want("b", 2.0)
    assert models.step(2.0) is None
    models.observe("a", 0, 3.0)
    assert models.step(3.0) == Unload("a")


def test_a_victim_that_a_request_has_just_reached_stays_and_is_not_chosen_again() -> None:
    models = table("a", "b", "c")
    load(models, "a", 1.0)
    load(models, "b", 2.0)
    models.want("c", 3.0)
    assert models.step(3.0) == Unload("a")
    models.busy("a", 3.0)
    assert models.models["a"].state is ModelState.LOADED
    assert models.step(3.0) == Unload("b")


def test_no_load_begins_before_the_victim_is_gone() -> None:
    models = table("a", "b", room=1.0)
    load(models, "a", 1.0)
    models.want("b", 2.0)
    assert models.step(2.0) == Unload("a")
    assert models.step(2.5) is None
    models.unloaded("a")
    assert models.step(3.0) == Load("b")


def test_two_waiters_unload_one_victim_each_and_in_their_order() -> None:
    models = table("a", "b", "c", room=1.0)
    load(models, "a", 1.0)
    models.want("c", 2.0)
    models.want("b", 3.0)
    assert models.step(3.0) == Unload("a")
    models.unloaded("a")
    assert models.step(3.0) == Load("c")
    models.loaded("c", 4.0)
    assert models.step(4.0) == Unload("c")
    models.busy("c", 4.0)
    assert models.step(4.0) is None, "c has the request that it was loaded for"


def test_a_model_that_is_wanted_while_it_leaves_comes_back() -> None:
    models = table("a")
    load(models, "a", 1.0)
    models.unwant("a")
    assert models.step(1.0) == Unload("a", is_forced=True)
    models.want("a", 2.0)
    models.unloaded("a")
    assert models.step(2.0) == Load("a")


def test_a_pinned_model_never_leaves_by_itself() -> None:
    models = ModelTable(
        [
            ModelEntry(name="a", needs=Room(1.0), pinned=True, keep_alive_s=1.0),
            ModelEntry(name="b", needs=Room(1.0)),
        ],
        Room(1.0),
    )
    load(models, "a", 1.0)
    models.want("b", 2.0)
    assert models.step(100.0) is None


def test_an_idle_model_leaves_after_its_time_and_not_before() -> None:
    models = table("a", keep_alive_s=10.0)
    load(models, "a", 1.0)
    models.observe("a", 0, 5.0)
    assert models.step(14.9) is None
    assert models.step(15.0) == Unload("a")


def test_a_failed_load_waits_longer_each_time() -> None:
    models = table("a")
    now, waits = 0.0, []
    for _ in range(8):
        models.want("a", now)
        assert models.step(now) == Load("a")
        models.failed("a", "no file", now)
        waits.append(models["a"].retry_s - now)
        models.want("a", now)
        assert models.step(models["a"].retry_s - 0.1) is None
        now = models["a"].retry_s
    assert waits == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert models["a"].reason == "no file"


def test_a_load_without_memory_takes_the_room_of_the_next_victim() -> None:
    models = table("a", "b", room=5.0)
    load(models, "b", 1.0)
    models.want("a", 2.0)
    assert models.step(2.0) == Load("a")
    models.failed("a", "no memory", 3.0, is_memory=True)
    assert models.step(3.0) == Unload("b")
    models.unloaded("b")
    assert models.step(4.0) == Load("a")
    models.failed("a", "no memory", 5.0, is_memory=True)
    assert models["a"].state is ModelState.FAILED


def test_what_fits_nowhere_is_refused_at_once_with_both_numbers() -> None:
    models = ModelTable([ModelEntry(name="a", needs=Room(3 * 2.0**30, 1.0))], Room(2.0**30, 8.0))
    models.want("a", 0.0)
    assert models.step(0.0) is None
    assert models["a"].reason == ("it needs 3.00 GiB and 1 GPUs; allowed for all models: 1.00 GiB and 8 GPUs")


@pytest.mark.parametrize("gpus", [1.0, 0.5])
def test_gpus_are_room_too(gpus: float) -> None:
    models = ModelTable([ModelEntry(name=name, needs=Room(0.0, gpus)) for name in ("a", "b")], Room(0.0, 1.0))
    load(models, "a", 1.0)
    models.want("b", 2.0)
    assert models.step(2.0) == (Unload("a") if gpus == 1.0 else Load("b"))


class World(RuleBasedStateMachine):
    """Requests come and go at two Ingresses; the owner does what the table says, at any pace."""

    NAMES: ClassVar = ("a", "b", "c", "d")
    SIZES: ClassVar = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 3.0}

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.room = Room(4.0)
        entries = [
            ModelEntry(name=name, needs=Room(self.SIZES[name]), pinned=name == "b", keep_alive_s=5.0)
            for name in self.NAMES
        ]
        self.table = ModelTable(entries, self.room)
        self.there: set[str] = set()
        """Models whose memory is taken, in truth."""
        self.users = dict.fromkeys(self.NAMES, 0)
        """Requests that run, in truth."""
        self.waiting = dict.fromkeys(self.NAMES, 0)
        self.doing: Load | Unload | None = None

    @rule(name=st.sampled_from(NAMES))
    def request(self, name: str) -> None:
        if self.table[name].state is ModelState.LOADED:
            self.users[name] += 1
        else:
            self.waiting[name] += 1
            self.table.want(name, self.now)

    @rule(name=st.sampled_from(NAMES))
    def end(self, name: str) -> None:
        self.users[name] = max(0, self.users[name] - 1)

    @rule(name=st.sampled_from(NAMES))
    def give_up(self, name: str) -> None:
        if self.waiting[name]:
            self.waiting[name] = 0
            self.table.forgo(name)

    @rule(seconds=st.floats(0.1, 4.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def observe(self) -> None:
        for name in self.NAMES:
            self.table.observe(name, self.users[name] + self.waiting[name], 0.0)

    @rule(name=st.sampled_from(NAMES))
    def ask_to_unload(self, name: str) -> None:
        self.table.unwant(name)

    @precondition(lambda self: self.doing is None)
    @rule()
    def begin(self) -> None:
        self.doing = self.table.step(self.now)
        if isinstance(self.doing, Load):
            assert self.doing.name not in self.there
            self.there.add(self.doing.name)

    @precondition(lambda self: self.doing is not None)
    @rule(fails=st.booleans(), is_memory=st.booleans())
    def finish(self, fails: bool, is_memory: bool) -> None:
        assert self.table.step(self.now) is None
        doing, self.doing = self.doing, None
        assert doing is not None
        name = doing.name
        if isinstance(doing, Load):
            if fails:
                self.there.remove(name)
                self.table.failed(name, "broken", self.now, is_memory=is_memory)
                if self.table[name].state is ModelState.FAILED:
                    self.waiting[name] = 0
                return
            self.table.loaded(name, self.now)
            self.users[name] += self.waiting[name]
            self.waiting[name] = 0
        elif self.users[name] and not doing.is_forced:
            self.table.busy(name, self.now)
        else:
            self.users[name] = 0
            self.there.remove(name)
            self.table.unloaded(name)

    @invariant()
    def room_is_kept(self) -> None:
        assert sum(self.SIZES[name] for name in self.there) <= self.room.memory_bytes

    @invariant()
    def who_runs_is_loaded(self) -> None:
        for name, number in self.users.items():
            assert not number or name in self.there

    @invariant()
    def the_table_knows_what_is_there(self) -> None:
        known = {
            name
            for name, each in self.table.models.items()
            if each.state in (ModelState.LOADING, ModelState.LOADED, ModelState.DRAINING)
        }
        assert known == self.there

    def teardown(self) -> None:
        """Once all requests have ended, everybody who waits is served or told why."""
        for name in self.NAMES:
            self.users[name] = 0
        for _ in range(60):
            self.now += 400.0
            self.observe()
            if self.doing is not None:
                self.finish(False, False)
                self.end(self.NAMES[0])
                for name in self.NAMES:
                    self.users[name] = 0
            else:
                self.begin()
        pinned = self.table["b"]
        for name, number in self.waiting.items():
            is_blocked = pinned.state is ModelState.LOADED and self.SIZES[name] + 1.0 > self.room.memory_bytes
            assert not number or is_blocked or self.table[name].wanted_s is None


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
