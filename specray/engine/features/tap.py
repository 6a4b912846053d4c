"""The feature tap: a runner that keeps, fused, the features of every row that it computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specray.engine.attention.sdpa import sequence_slots
from specray.engine.cache.state_slots import StateSlots
from specray.engine.features.base import FeatureStore, Fuser
from specray.engine.inputs import Moves, SequenceInput, StateCopy
from specray.engine.schedule import Runner
from specray.engine.step import ForwardOutput


class FeatureTap:
    """Implements ``schedule.Runner`` over another one, whose forward gives the drafter's layers.

    Features lie at the slots of their rows: chunks of a prompt, and rows of draft tokens, whatever becomes of
    them, are one case. They follow K/V where these are copied or moved.

    Args:
        runner: of the leader.
        fuser: of the drafter that reads them.
        store: of the runner's blocks.
        device: of the features.
    """

    def __init__(self, runner: Runner, fuser: Fuser, store: FeatureStore, device: torch.device) -> None:
        self._runner = runner
        self._fuser = fuser
        self._device = device
        self.store = store

    @property
    def states(self) -> StateSlots | None:
        return self._runner.states

    @property
    def pending_moves(self) -> Moves:
        return self._runner.pending_moves

    def run(self, inputs: Sequence[SequenceInput]) -> ForwardOutput:
        """Features are stored, and no part of the output."""
        output = self._runner.run(inputs)
        assert output.features is not None, "the forward was built for the drafter"
        fused = self._fuser.fuse(output.features)
        first = 0
        for item in inputs:
            count = len(item.token_ids)
            self.store.write(self._slots(item), fused[first : first + count])
            first += count
        return ForwardOutput(output.logits)

    def advance(self, kept: Sequence[int], token_ids: Sequence[int]) -> ForwardOutput | None:
        return None

    def copy_tokens(
        self,
        source_block_ids: Sequence[int],
        destination_block_ids: Sequence[int],
        num_tokens: int,
        *,
        first: int = 0,
    ) -> None:
        self._runner.copy_tokens(source_block_ids, destination_block_ids, num_tokens, first=first)
        source, destination = (
            sequence_slots(ids, first, num_tokens, self.store.block_size, self._device)
            for ids in (source_block_ids, destination_block_ids)
        )
        self.store.copy(source, destination)

    def copy_state(self, copy: StateCopy) -> None:
        """Features lie beside keys and values: a snapshot needs none."""
        self._runner.copy_state(copy)

    def move_tokens(self, block_ids: Sequence[int], sources: Sequence[int], first: int) -> None:
        """Features are moved at once."""
        self._runner.move_tokens(block_ids, sources, first)
        moved = [(source, index) for index, source in enumerate(sources, first) if source != index]
        if moved:
            slots = [
                [self._slot(block_ids, index) for index in indices] for indices in zip(*moved, strict=True)
            ]
            self.store.copy(*torch.tensor(slots, device=self._device).unbind())

    def close(self) -> None:
        self._runner.close()

    def _slots(self, item: SequenceInput) -> slice | torch.Tensor:
        if item.visibility:
            slots = [self._slot(item.block_ids, row.kv_index) for row in item.visibility]
            return torch.tensor(slots, device=self._device)
        return sequence_slots(item.block_ids, item.start, item.end, self.store.block_size, self._device)

    def _slot(self, block_ids: Sequence[int], index: int) -> int:
        size = self.store.block_size
        return block_ids[index // size] * size + index % size
