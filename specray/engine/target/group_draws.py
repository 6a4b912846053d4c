"""Draws of a group's target whose ranks exchange their best tokens instead of their logits.

That takes draws that are sent with the step: greedy and coupled ones, whole and unprocessed. Whatever needs
a row of logits in one place goes the usual way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specray.engine.cache.state_slots import StateSlots
from specray.engine.inputs import Moves, SequenceInput
from specray.engine.runner.runner import ModelRunner
from specray.engine.sampling.device.rows import row_settings
from specray.engine.sampling.device.shards import ShardDraws
from specray.engine.sampling.processors import cuts_tail, shifts_logits
from specray.engine.sampling.state import RowGroup
from specray.engine.sampling.verify import draw_keys
from specray.engine.schedule import CatchUp, catch_up
from specray.engine.step import ForwardOutput


class GroupDraws:
    """Runs the steps of one target.

    Args:
        max_num_batched_tokens: rows of one forward, at most.
    """

    def __init__(self, runner: ModelRunner, max_num_batched_tokens: int) -> None:
        self._runner = runner
        self._max_rows = max_num_batched_tokens

    def run(self, work: Sequence[CatchUp], groups: Sequence[RowGroup]) -> list[int] | None:
        """Computes what sequences lack, and draws.

        Args:
            work: in one forward.
            groups: rows of the work that has logits, in its order.

        Returns:
            The token that each row draws; None: these draws take logits, and nothing has happened.
        """
        if not groups or sum(item.sequence.num_missing_tokens for item in work) > self._max_rows:
            return None
        if any(shifts_logits(each) or cuts_tail(each.sampling) or each.is_tested for each in groups):
            return None
        draws = ShardDraws(
            [key for group in groups for key in draw_keys(group)],
            [row_settings(group)[0] for group in groups for _ in range(group.num_rows)],
        )
        drawing = _Drawing(self._runner, draws)
        catch_up(drawing, work, self._max_rows)
        assert len(drawing.token_ids) == len(draws.keys), (len(drawing.token_ids), len(draws.keys))
        return drawing.token_ids


class _Drawing:
    """Implements ``schedule.Runner`` for one step: keeps what is drawn, and gives no logits."""

    def __init__(self, runner: ModelRunner, draws: ShardDraws) -> None:
        self.advance, self.copy_tokens = runner.advance, runner.copy_tokens
        self.move_tokens, self.close = runner.move_tokens, runner.close
        self.copy_state = runner.copy_state
        self._runner = runner
        self._draws = draws
        self.token_ids: list[int] = []

    @property
    def states(self) -> StateSlots | None:
        return self._runner.states

    @property
    def pending_moves(self) -> Moves:
        return self._runner.pending_moves

    def run(self, inputs: Sequence[SequenceInput]) -> ForwardOutput:
        assert not self.token_ids, "one forward"
        self.token_ids = self._runner.run_draws(inputs, self._draws)
        return ForwardOutput(torch.empty(0, 0))


def group_draws(runner: object, max_num_batched_tokens: int) -> GroupDraws | None:
    """Draws of a runner whose logits are shared by ranks; None: they are in one place."""
    if isinstance(runner, ModelRunner) and runner.can_draw:
        return GroupDraws(runner, max_num_batched_tokens)
    return None
