"""What calls hold of the Ingress and of their keys adds up, in whatever order they come, change and end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from specray.config import AuthConfig, KeyConfig
from specray.errors import InvalidRequestError, OverloadedError, UnauthenticatedError
from specray.serving.admission.api_keys import Caller, Keyring, key_hash
from specray.serving.admission.places import Place, Places

MAX_CALLS = 3
MAX_BYTES = 100
NAMES = ("a", "b")
SIZES = st.integers(1, MAX_BYTES)


def secret(name: str, generation: int) -> str:
    return f"sk-specray-{name}-{generation}"


@dataclass(eq=False)
class Call:
    """One call as the model counts it."""

    place: Place
    key: str | None
    """Name of its key; None: the key was removed since."""
    tokens: list[int] = field(default_factory=lambda: [0])
    """Prompt tokens of its unfinished requests."""
    num_bytes: int = 0
    is_arriving: bool = True


class Accounts(RuleBasedStateMachine):
    """The Ingress's accounts against a list of calls, while keys come, go, are rotated and change limits."""

    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.places = Places(MAX_CALLS, timeout_s=60.0, max_held_bytes=MAX_BYTES)
        self.keys = dict.fromkeys(NAMES, (0, 2, 20))
        """Generation and limits (requests, waiting tokens) of the configured keys."""
        self.keyring = Keyring(self.auth())
        self.open: list[Call] = []

    def teardown(self) -> None:
        self.loop.close()

    def auth(self) -> AuthConfig:
        return AuthConfig(
            keys=tuple(
                KeyConfig(
                    name=name,
                    sha256=key_hash(secret(name, generation)),
                    max_requests=most,
                    max_queued_tokens=most_tokens,
                )
                for name, (generation, most, most_tokens) in self.keys.items()
            )
        )

    def of(self, caller: Caller) -> list[Call]:
        return [call for call in self.open if call.place.caller is caller]

    def num_requests(self, name: str) -> int:
        return sum(call.place.quota.num_requests for call in self.open if call.key == name)

    def answered(self) -> int:
        return sum(not call.is_arriving for call in self.open)

    @rule(target=calls, name=st.sampled_from(NAMES), age=st.sampled_from((0, 0, 0, 1)))
    def arrive(self, name: str, age: int) -> object:
        """With the key in force, or with one that was rotated away."""
        configured = self.keys.get(name)
        generation = (configured or (0,))[0] - age
        try:
            caller = self.keyring.identify([f"Bearer {secret(name, generation)}"])
        except UnauthenticatedError:
            assert configured is None or configured[0] != generation
            return multiple()
        assert configured is not None and configured[0] == generation and caller.name == name
        has_room = self.answered() < MAX_CALLS and self.num_requests(name) < configured[1]

        async def arriving() -> Place:
            return self.places.arrive(caller)

        try:
            place = self.loop.run_until_complete(arriving())
        except OverloadedError:
            assert not has_room
            return multiple()
        assert has_room
        call = Call(place, name)
        self.open.append(call)
        self.drop_displaced()
        return call

    @rule(call=calls, num_bytes=SIZES)
    def hold(self, call: Call, num_bytes: int) -> None:
        if call not in self.open or not call.is_arriving:
            return
        with suppress(OverloadedError):  # It has itself most of what comes: it is dropped below.
            call.place.hold(num_bytes)
        call.num_bytes += num_bytes
        self.drop_displaced()

    def drop_displaced(self) -> None:
        """Ends calls whose room was taken, as the server does when they next ask."""
        for call in [one for one in self.open if one.is_arriving]:
            try:
                call.place.hold(0)
            except OverloadedError:
                assert not call.place.num_bytes
                self.end(call)

    def end(self, call: Call) -> None:
        call.place.leave()
        self.open.remove(call)

    @rule(call=calls)
    def begin(self, call: Call) -> None:
        if call not in self.open or not call.is_arriving:
            return
        has_room = self.answered() < MAX_CALLS
        try:
            call.place.begin()
        except OverloadedError:
            assert not has_room
            self.end(call)
            return
        assert has_room
        call.is_arriving = False

    @rule(call=calls, tokens=st.lists(st.integers(1, 15), min_size=1, max_size=3))
    def claim(self, call: Call, tokens: list[int]) -> None:
        if call not in self.open or call.is_arriving:
            return
        before = (call.place.quota.num_requests, call.place.quota.num_tokens)
        try:
            call.place.quota.claim(tokens)
        except (InvalidRequestError, OverloadedError):
            assert (call.place.quota.num_requests, call.place.quota.num_tokens) == before
            return
        call.tokens = list(tokens)

    @rule(call=calls)
    def finish_first(self, call: Call) -> None:
        if call in self.open and call.place.quota.num_requests:
            index = len(call.tokens) - call.place.quota.num_requests
            call.place.quota.answered(index, is_last=True)
            call.tokens[index] = 0

    @rule(call=calls)
    def release_body(self, call: Call) -> None:
        if call in self.open and not call.is_arriving:
            call.place.release_body()
            call.place.release_body()
            call.num_bytes = 0

    @rule(call=calls)
    def leave(self, call: Call) -> None:
        """Also calls that have left already."""
        call.place.leave()
        if call in self.open:
            self.open.remove(call)

    @rule(
        name=st.sampled_from(NAMES),
        rotation=st.integers(0, 1),
        most=st.integers(1, 3),
        most_tokens=st.integers(1, 30),
    )
    def reload(self, name: str, rotation: int, most: int, most_tokens: int) -> None:
        self.keys[name] = (self.keys.get(name, (0,))[0] + rotation, most, most_tokens)
        self.keyring.configure(self.auth())

    @rule(name=st.sampled_from(NAMES))
    def remove_key(self, name: str) -> None:
        """Its calls go on; the last key stays, since a service without keys lets everybody in."""
        if len(self.keys) > 1:
            self.keys.pop(name, None)
            for call in self.open:
                call.key = None if call.key == name else call.key
            self.keyring.configure(self.auth())

    @invariant()
    def calls_add_up(self) -> None:
        assert self.places.num_calls == self.answered() <= MAX_CALLS
        assert self.places.num_arriving == len(self.open) - self.answered() <= MAX_CALLS
        assert sum(call.place.num_bytes for call in self.open) <= MAX_BYTES or not any(
            call.place.num_bytes for call in self.open if call.is_arriving
        )
        for call in self.open:
            assert call.place.num_bytes == call.num_bytes

    @invariant()
    def keys_add_up(self) -> None:
        for caller in {call.place.caller for call in self.open}:
            calls = self.of(caller)
            assert caller.num_requests == sum(call.place.quota.num_requests for call in calls)
            assert caller.num_queued_tokens == sum(sum(call.tokens) for call in calls)

    @invariant()
    def what_has_ended_holds_nothing(self) -> None:
        for name, (generation, *_) in self.keys.items():
            caller = self.keyring.identify([f"Bearer {secret(name, generation)}"])
            if not self.of(caller):
                assert (caller.num_requests, caller.num_queued_tokens) == (0, 0)


TestAccounts = pytest.mark.slow(Accounts.TestCase)
TestAccounts.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
