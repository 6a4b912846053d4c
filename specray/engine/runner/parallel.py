"""A tensor-parallel group: how its ranks meet, and how the leader tells the others what to run.

Meeting: rank 0 opens a store on a free port and reports its address; every rank joins through it. The
group's collectives inside a forward use the default process group (gloo on CPU, NCCL on CUDA); what the
leader says goes over a gloo group of its own, as one small integer tensor:

    [kind, payload_len, num_moves, payload ...]
                                         payload of a step, per sequence:
                                         start, num_logits, num_tokens, num_blocks, num_masks,
                                         tokens ..., blocks ..., masks (three integers each) ...
                                         payload of a copy:
                                         first, num_tokens, num_blocks, source ..., destination ...

Behind the payload of either come the slots of K/V that are moved before it: sources ..., destinations ...
A silent leader is a lost leader: while it has nothing to run it sends beats.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from specray.engine.attention.mask import Visibility
from specray.engine.runner.inputs import CopyInput, Moves, SequenceInput
from specray.errors import ConfigError, EngineLostError

_MESSAGE_LEN = 256
"""Integers of the first broadcast; nearly every decode step fits."""
_HEADER_LEN = 3


NO_MOVES = Moves()
"""No moves; not to be added to."""


class _Kind(enum.IntEnum):
    BEAT = 0
    STEP = 1
    CLOSE = 2
    COPY = 3


class Received(NamedTuple):
    """What the leader tells a follower to do."""

    work: list[SequenceInput] | CopyInput
    """A step, or a copy."""
    moves: Moves
    """Moves before it."""


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


class GroupStore:
    """The store at which the ranks of one group meet; rank 0 opens it and keeps it for the group's life.

    Args:
        host: the name or address under which the other ranks reach this process.
        timeout_s: for every wait on the store.
    """

    def __init__(self, host: str, *, timeout_s: float) -> None:
        # Port 0 and the real port reported: nobody can take the port between choosing and opening it. The
        # socket is ours because the store's own would listen on every address of the machine.
        listener = socket.create_server((host, 0), family=_family(host), backlog=128)
        port = listener.getsockname()[1]
        self.store = TCPStore(
            host,
            port,
            is_master=True,
            master_listen_fd=listener.detach(),
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=timeout_s),
        )
        self.address = f"{host}:{self.store.port}"


@dataclass(frozen=True, slots=True)
class GroupArgs:
    """One process's place in a group, and its deadlines."""

    rank: int
    world_size: int
    device_type: str
    """``cpu`` or ``cuda``. Under ``cuda`` each rank must see its own device as device 0."""
    start_timeout_s: float = 600.0
    """Seconds to wait for the other ranks: to meet, to load, and in any one collective."""
    silence_timeout_s: float = 60.0
    """Seconds of silence after which the leader counts as lost."""


class ParallelContext:
    """One process's place in a running group. One per process: torch's default group is its data plane."""

    def __init__(self, args: GroupArgs, starting: dist.ProcessGroup, control: dist.ProcessGroup) -> None:
        self.rank = args.rank
        self.world_size = args.world_size
        self._args = args
        self._starting = starting
        self._control = control
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._failure: EngineLostError | None = None
        self._beating: threading.Thread | None = None

    @classmethod
    def join(cls, args: GroupArgs, meeting: GroupStore | str) -> ParallelContext:
        """Meets the other ranks.

        Args:
            meeting: rank 0's own store, or its address ``host:port``.

        Raises:
            EngineLostError: not all ranks came within ``start_timeout_s``.
        """
        timeout = timedelta(seconds=args.start_timeout_s)
        try:
            store = meeting.store if isinstance(meeting, GroupStore) else _connect(meeting, timeout)
            backend = "cpu:gloo,cuda:nccl" if args.device_type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=args.rank, world_size=args.world_size, timeout=timeout
            )
            # Ranks load at different speeds, and what one sends waits for its receiver for the timeout of the
            # group, whatever that of the barrier is.
            starting = dist.new_group(backend="gloo", timeout=timeout)
            control = dist.new_group(backend="gloo", timeout=timedelta(seconds=args.silence_timeout_s))
        except RuntimeError as error:
            raise EngineLostError(f"rank {args.rank} of {args.world_size} found no group: {error}") from None
        assert starting is not None and control is not None
        return cls(args, starting, control)

    def start(self, choices: Mapping[str, object]) -> None:
        """Waits until every rank is ready to run; then the leader begins to beat.

        Args:
            choices: what this rank chose for itself and the others must have chosen too. What the leader
                says of blocks means other tokens to a rank whose blocks are of another size.

        Raises:
            EngineLostError: a rank did not come within ``start_timeout_s``.
            ConfigError: the ranks chose differently; the message names what, and who chose what.
        """
        everyones: list[dict[str, object]] = [{} for _ in range(self.world_size)]
        try:
            dist.monitored_barrier(
                group=self._starting, timeout=timedelta(seconds=self._args.start_timeout_s)
            )
            dist.all_gather_object(everyones, dict(choices), group=self._starting)
        except RuntimeError as error:
            raise EngineLostError(f"the group did not start: {error}") from None
        check_same_choices(everyones)
        if self.rank == 0:
            self._beating = threading.Thread(target=self._beat, name="specray-group-beat", daemon=True)
            self._beating.start()

    def least(self, value: int) -> int:
        """The least of the ranks' values; every rank asks. Raises EngineLostError as ``start`` does."""
        everyones = [0] * self.world_size
        try:
            dist.monitored_barrier(
                group=self._starting, timeout=timedelta(seconds=self._args.start_timeout_s)
            )
            dist.all_gather_object(everyones, value, group=self._starting)
        except RuntimeError as error:
            raise EngineLostError(f"the group did not start: {error}") from None
        return min(everyones)

    def send_step(self, inputs: Sequence[SequenceInput], moves: Moves = NO_MOVES) -> None:
        """Leader: hands a step to the other ranks. Raises EngineLostError when one is gone."""
        self._send(_Kind.STEP, encode_inputs(inputs), moves)

    def send_copy(self, copy: CopyInput, moves: Moves = NO_MOVES) -> None:
        """Leader: hands a copy to the other ranks. Raises EngineLostError when one is gone."""
        self._send(_Kind.COPY, encode_copy(copy), moves)

    def receive_step(self) -> Received | None:
        """Follower: waits for the next step or copy; None: the leader has closed.

        Raises:
            EngineLostError: the leader is gone, or was silent for ``silence_timeout_s``.
        """
        while True:
            kind, payload, moves = self._receive()
            if kind == _Kind.STEP:
                return Received(decode_inputs(payload), moves)
            if kind == _Kind.COPY:
                return Received(decode_copy(payload), moves)
            if kind == _Kind.CLOSE:
                return None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, in place. Raises EngineLostError when one is gone."""
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise EngineLostError(f"rank {self.rank} lost its group: {error}") from None
        return tensor

    def all_gather(self, columns: torch.Tensor, total: int) -> torch.Tensor:
        """Joins the ranks' columns: ``[num_rows, <= ceil(total / world_size)]`` to ``[num_rows, total]``."""
        width = -(-total // self.world_size)
        mine = torch.nn.functional.pad(columns, (0, width - columns.shape[1])).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            dist.all_gather(parts, mine)
        except RuntimeError as error:
            raise EngineLostError(f"rank {self.rank} lost its group: {error}") from None
        return torch.cat(parts, -1)[:, :total]

    def first_row(self, total: int) -> int:
        """The first of ``total`` rows that this rank holds, where rows are dealt in equal runs."""
        return self.rank * -(-total // self.world_size)

    def close(self) -> None:
        """Lets the followers go (leader) and leaves the group; idempotent."""
        if self._is_closing.is_set():
            return
        if self.rank == 0:
            with contextlib.suppress(EngineLostError):  # Whoever is gone needs no goodbye.
                self._send(_Kind.CLOSE, [])
        self._is_closing.set()
        if self._beating is not None:
            self._beating.join(self._args.silence_timeout_s)
        dist.destroy_process_group()

    def _beat(self) -> None:
        while not self._is_closing.wait(self._args.silence_timeout_s / 4):
            try:
                self._send(_Kind.BEAT, [])
            except EngineLostError as error:
                self._failure = error
                return

    def _send(self, kind: _Kind, payload: list[int], moves: Moves = NO_MOVES) -> None:
        message = [int(kind), len(payload), len(moves.sources), *payload, *moves.sources, *moves.destinations]
        first = message[:_MESSAGE_LEN] + [0] * (_MESSAGE_LEN - len(message))
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._is_closing.is_set():
                return
            self._broadcast(torch.tensor(first))
            if len(message) > _MESSAGE_LEN:
                self._broadcast(torch.tensor(message[_MESSAGE_LEN:]))

    def _receive(self) -> tuple[int, list[int], Moves]:
        message: list[int] = self._broadcast(torch.empty(_MESSAGE_LEN, dtype=torch.int64)).tolist()
        kind, payload_len, num_moves = message[:_HEADER_LEN]
        end = _HEADER_LEN + payload_len
        num_missing = end + 2 * num_moves - _MESSAGE_LEN
        if num_missing > 0:
            message += self._broadcast(torch.empty(num_missing, dtype=torch.int64)).tolist()
        slots = message[end : end + 2 * num_moves]
        return kind, message[_HEADER_LEN:end], Moves(slots[:num_moves], slots[num_moves:])

    def _broadcast(self, message: torch.Tensor) -> torch.Tensor:
        try:
            dist.broadcast(message, src=0, group=self._control)
        except RuntimeError as error:
            raise EngineLostError(f"rank {self.rank} lost its group: {error}") from None
        return message


def check_same_choices(choices: Sequence[Mapping[str, object]]) -> None:
    """Raises ConfigError where the ranks of a group, in their order, differ in what they chose."""
    different = []
    for name in choices[0]:
        ranks: dict[object, list[int]] = {}
        for rank, own in enumerate(choices):
            ranks.setdefault(own[name], []).append(rank)
        if len(ranks) > 1:
            parts = [f"{value!r} on {_named_ranks(own)}" for value, own in ranks.items()]
            different.append(f"{name} is {', '.join(parts)}")
    if different:
        raise ConfigError(
            f"{'; '.join(different)}; allowed: the same on all ranks; set what works on all of them"
        )


def _named_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def encode_inputs(inputs: Sequence[SequenceInput]) -> list[int]:
    """A step as integers."""
    encoded: list[int] = []
    for item in inputs:
        encoded += (
            item.start,
            item.num_logits,
            len(item.token_ids),
            len(item.block_ids),
            len(item.visibility),
        )
        encoded += item.token_ids
        encoded += item.block_ids
        for row in item.visibility:
            encoded += (row.prefix_len, row.first_index, row.signed_ancestors)
    return encoded


def decode_inputs(encoded: Sequence[int]) -> list[SequenceInput]:
    """The inverse of :func:`encode_inputs`."""
    inputs: list[SequenceInput] = []
    at = 0
    while at < len(encoded):
        start, num_logits, num_tokens, num_blocks, num_masks = encoded[at : at + 5]
        tokens_at = at + 5
        blocks_at = tokens_at + num_tokens
        rows_at = blocks_at + num_blocks
        at = rows_at + 3 * num_masks
        visibility = tuple(Visibility.from_signed(*encoded[row : row + 3]) for row in range(rows_at, at, 3))
        token_ids, block_ids = encoded[tokens_at:blocks_at], encoded[blocks_at:rows_at]
        inputs.append(SequenceInput(token_ids, start, block_ids, num_logits, visibility))
    return inputs


def encode_copy(copy: CopyInput) -> list[int]:
    """A copy as integers."""
    sources = copy.source_block_ids
    return [copy.first, copy.num_tokens, len(sources), *sources, *copy.destination_block_ids]


def decode_copy(encoded: Sequence[int]) -> CopyInput:
    """The inverse of :func:`encode_copy`."""
    first, num_tokens, num_sources = encoded[:3]
    return CopyInput(encoded[3 : 3 + num_sources], encoded[3 + num_sources :], first, num_tokens)


def _connect(address: str, timeout: timedelta) -> TCPStore:
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=timeout)
