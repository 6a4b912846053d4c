"""A drafter of the target's features that is seldom right at once is named in the log, once."""

from __future__ import annotations

from typing import Any

import pytest

from specray.fakes import AdversarialGuesser, FakeTarget, PerfectGuesser, VirtualClock
from specray.router.first_tokens import FirstTokens
from specray.types import DraftKind
from tests.unit.router.harness import MODEL, fake_draft, fake_target, in_virtual_time, request, serving

ON_TARGET: dict[str, Any] = {"draft_kind": DraftKind.FEATURES, "has_draft_model": False}
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.name == "specray.router.first_tokens"]


def test_less_than_two_fifths_of_256_rounds_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    found = FirstTokens()
    for number in range(600):
        found.observe("good", int(number < 103))  # 0.402 of the first 256
    assert warnings(caplog) == []
    for number in range(255):
        found.observe("bad", 3 * (number < 102))  # However many were accepted behind it.
    assert warnings(caplog) == []
    for _ in range(300):
        found.observe("bad", 0)
    assert [message.split(" (")[0] for message in warnings(caplog)] == [
        "of the first draft tokens of drafter 'bad', 0.398 were accepted in 256 rounds"
    ]
    for _ in range(256):
        found.observe("another", 0)
    assert len(warnings(caplog)) == 2


@in_virtual_time
async def serve(
    clock: VirtualClock, target: FakeTarget, sampling: dict[str, Any], num_tokens: int, **options: Any
) -> None:
    async with serving(clock, target=target, num_speculative_tokens=3, **options) as pair:
        for number in range(num_tokens // 100):
            await pair.router.complete(request(str(number), max_tokens=100, **sampling))
        await pair.settle()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_drafter_on_the_target(caplog: pytest.LogCaptureFixture, sampling: dict[str, Any]) -> None:
    serve(FakeTarget(MODEL, drafter=PerfectGuesser(MODEL)), sampling, 1200, **ON_TARGET)
    assert warnings(caplog) == []
    serve(FakeTarget(MODEL, drafter=AdversarialGuesser(MODEL)), sampling, 300, **ON_TARGET)
    assert [message.split(",")[0] for message in warnings(caplog)] == [
        "of the first draft tokens of drafter 'guesser'"
    ]


@pytest.mark.parametrize("name", ["head", ""])
def test_a_drafter_in_the_drafts_process(caplog: pytest.LogCaptureFixture, name: str) -> None:
    """A draft model that reads no features may be as bad as it is: the control leaves it out."""
    draft = fake_draft(AdversarialGuesser(MODEL), feature_drafter=name)
    serve(fake_target(feature_drafter=name), GREEDY, 300, draft=draft, overlap="serial")
    assert len(warnings(caplog)) == (name == "head")
