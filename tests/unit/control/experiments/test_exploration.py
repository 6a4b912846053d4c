"""When speculation that is off is tried again: one session for all, and no oftener than its price allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from specray.control.experiments import EXPLORATION_INTERVAL_ROUNDS, MAX_EXPLORATION_SHARE, Exploration


def unasked() -> float:
    raise AssertionError("what a try would cost was asked before it could decide")


def rested(num_rounds: int) -> Exploration:
    """After so many rounds of all sessions without draft tokens."""
    exploration = Exploration()
    for _ in range(num_rounds):
        exploration.add(is_used=False)
    return exploration


def test_a_free_try_is_due_after_an_interval_of_every_session() -> None:
    interval = 4 * EXPLORATION_INTERVAL_ROUNDS
    assert not rested(interval - 1).is_due(0, num_running=4, num_prefill_steps=unasked)
    assert rested(interval).is_due(0, num_running=4, num_prefill_steps=lambda: 0.0)


def test_a_try_whose_reading_takes_three_steps_is_due_after_six_hundred() -> None:
    num_rounds = round(3 / MAX_EXPLORATION_SHARE)
    assert num_rounds == 600
    assert not rested(2 * num_rounds - 1).is_due(0, num_running=2, num_prefill_steps=lambda: 3.0)
    assert rested(2 * num_rounds).is_due(0, num_running=2, num_prefill_steps=lambda: 3.0)


@pytest.mark.parametrize(
    "use", [Exploration.begin, partial(Exploration.add, is_used=True)], ids=["try", "use"]
)
def test_after_a_session_began_to_try_or_speculated_all_wait_for_another_interval(
    use: Callable[[Exploration], None],
) -> None:
    exploration = rested(2 * EXPLORATION_INTERVAL_ROUNDS)
    use(exploration)
    for _ in range(EXPLORATION_INTERVAL_ROUNDS - 1):
        exploration.add(is_used=False)
    assert not exploration.is_due(0, num_running=1, num_prefill_steps=unasked)
    exploration.add(is_used=False)
    assert exploration.is_due(0, num_running=1, num_prefill_steps=lambda: 0.0)


def test_while_others_use_the_draft_a_session_tries_by_its_own_rounds() -> None:
    exploration = rested(3)
    assert not exploration.is_due(EXPLORATION_INTERVAL_ROUNDS - 1, num_running=4, num_prefill_steps=unasked)
    assert exploration.is_due(EXPLORATION_INTERVAL_ROUNDS, num_running=4, num_prefill_steps=unasked)
