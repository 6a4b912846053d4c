"""The benchmark of a chat's next turn, over the toy model."""

from __future__ import annotations

import pytest

from specray.bench.prefix import Turn, measure_turn
from specray.errors import ConfigError
from tests.unit.engine.cache.state_runner import state_target


def test_the_second_turn_finds_what_the_first_has_left_and_with_another_salt_nothing() -> None:
    target, runner = state_target()
    cost = measure_turn(target, Turn(600, 70, 40), num_repeats=3)
    assert (cost.num_prompt, cost.num_found) == (600, 512)
    assert cost.least_faster <= cost.times_faster <= cost.most_faster
    # Four first turns, and twice four second ones, of which those that are warm begin at 512.
    assert runner.num_rows == 4 * (490 + 69) + 4 * (600 - 512) + 4 * 600
    target.check_integrity()
    assert target.info.num_blocks_in_use == 0


@pytest.mark.parametrize("turn", [Turn(1024, 1, 1), Turn(100, 50, 50), Turn(9, 1, 0)])
def test_a_turn_that_does_not_fit_is_refused(turn: Turn) -> None:
    target, _ = state_target()
    with pytest.raises(ConfigError, match=f"prompt_len is {turn.num_prompt} with an answer of"):
        measure_turn(target, turn)
