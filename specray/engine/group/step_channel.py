"""How messages of a group's leader reach the other ranks: through shared memory, or over the network."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from specray.engine.group.step_ring import StepRing

_log = logging.getLogger(__name__)

_MESSAGE_LEN = 256
"""Integers of the first broadcast, of which one is the length; nearly every decode step fits."""


class Channel(Protocol):
    """Carries messages from rank 0 to all others, in order. Raises RuntimeError when one is gone."""

    def send(self, message: Sequence[int]) -> None: ...

    def receive(self) -> list[int]: ...


class NetworkChannel:
    """Implements :class:`Channel` over a gloo group, whose timeout holds."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, message: Sequence[int]) -> None:
        whole = [len(message), *message]
        first = whole[:_MESSAGE_LEN] + [0] * (_MESSAGE_LEN - len(whole))
        self._broadcast(torch.tensor(first))
        if len(whole) > _MESSAGE_LEN:
            self._broadcast(torch.tensor(whole[_MESSAGE_LEN:]))

    def receive(self) -> list[int]:
        message: list[int] = self._broadcast(torch.empty(_MESSAGE_LEN, dtype=torch.int64)).tolist()
        num_missing = 1 + message[0] - _MESSAGE_LEN
        if num_missing > 0:
            message += self._broadcast(torch.empty(num_missing, dtype=torch.int64)).tolist()
        return message[1 : 1 + message[0]]

    def _broadcast(self, message: torch.Tensor) -> torch.Tensor:
        dist.broadcast(message, src=0, group=self._group)
        return message


class RingChannel:
    """Implements :class:`Channel` through shared memory."""

    def __init__(self, ring: StepRing, timeout: timedelta) -> None:
        self._ring = ring
        self._timeout_s = timeout.total_seconds()

    def send(self, message: Sequence[int]) -> None:
        try:
            self._ring.write(message, self._timeout_s)
        except TimeoutError as error:
            raise RuntimeError(f"a rank receives no messages: {error}") from None

    def receive(self) -> list[int]:
        try:
            return self._ring.read(self._timeout_s)
        except TimeoutError as error:
            raise RuntimeError(f"the leader is silent: {error}") from None


def shared_channel(
    rank: int, world_size: int, group: dist.ProcessGroup, timeout: timedelta
) -> Channel | None:
    """A channel through shared memory; None where not all ranks reach the leader's. Every rank asks.

    Args:
        group: over which the ranks agree.
        timeout: of silence.
    """
    ring, told, path = None, [("", 0)], ""
    if rank == 0:
        try:
            ring, path, token = StepRing.create(world_size - 1)
            told = [(path, token)]
        except OSError as error:
            _log.info("messages of the group go over the network: %s", error)
    try:
        dist.broadcast_object_list(told, src=0, group=group)
        if rank > 0 and told[0][0]:
            try:
                ring = StepRing.attach(*told[0], world_size - 1, rank - 1)
            except OSError as error:
                _log.info("messages of the group go over the network: %s", error)
        have_it = [False] * world_size
        dist.all_gather_object(have_it, ring is not None, group=group)
    finally:
        if path:
            # Whoever has it keeps it; nothing is left behind by a process that dies.
            Path(path).unlink()
    return RingChannel(ring, timeout) if ring is not None and all(have_it) else None
