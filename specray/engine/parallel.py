"""A tensor-parallel group: how its ranks meet, and how the leader tells the others what to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specray.engine.runner import SequenceInput


class ParallelContext:
    """One process's place in the group."""

    rank: int
    world_size: int

    def send_step(self, inputs: Sequence[SequenceInput]) -> None:
        raise NotImplementedError

    def receive_step(self) -> list[SequenceInput] | None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
