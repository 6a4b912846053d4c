"""A tensor-parallel group: how its ranks meet, and how the leader sends the others what to run.

Meeting: rank 0 opens a store on a free port and reports its address; every rank joins through it. The
group's collectives inside a forward use the default process group (gloo on CPU, NCCL on CUDA). What the
leader says goes through shared memory where all ranks of a CUDA group are on one node, else over a gloo group
of its own (``step_channel``), as a list of integers:

    [kind, payload_len, num_moves, payload ...]

The payload is a step or a copy as ``wire`` has them, before a step perhaps draws from its logits. Behind it
come the slots of K/V that are moved before: sources ..., destinations ... A silent leader is a lost leader:
while it has nothing to run it sends beats.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from specray.engine.group.step_channel import Channel, NetworkChannel, shared_channel
from specray.engine.group.wire import (
    SentTables,
    decode_adapter,
    decode_copy,
    decode_state_copy,
    encode_adapter,
    encode_copy,
    encode_state_copy,
)
from specray.engine.inputs import AdapterInput, CopyInput, Moves, SequenceInput, StateCopy
from specray.errors import ConfigError, EngineLostError

_HEADER_LEN = 3

T = TypeVar("T")


NO_MOVES = Moves()
"""No moves; not to be added to."""


class _Kind(enum.IntEnum):
    BEAT = 0
    STEP = 1
    CLOSE = 2
    COPY = 3
    DRAW = 4
    STATE = 5
    ADAPTER = 6


class Received(NamedTuple):
    """Kind of a message to a follower."""

    work: list[SequenceInput] | CopyInput | StateCopy | AdapterInput
    """A step, a copy, or something to do with adapters."""
    moves: Moves
    """Moves before it."""
    draws: list[int] | None = None
    """Draws from the step's logits, encoded (``shards.ShardDraws``); None: its logits are joined."""


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
    """``cpu`` or ``cuda``."""
    gpu_index: int | None = None
    """Index of this rank's GPU among those that its process sees; None: the current one."""
    start_timeout_s: float = 600.0
    """Seconds to wait for the other ranks: to meet, to load, and in any one collective."""
    silence_timeout_s: float = 60.0
    """Seconds of silence after which the leader counts as lost."""
    shares_memory: bool | None = None
    """Whether messages go through shared memory if all ranks reach it; None: under ``cuda``, where ranks have
    time and cores to look for them."""
    draws_apart: bool | None = None
    """Whether ranks draw from the logits that each has, where they can, instead of joining them; None: under
    ``cuda``. On a CPU joined logits are drawn from faster."""


class ParallelContext:
    """One process's place in a running group. One per process: torch's default group is its data plane."""

    def __init__(self, args: GroupArgs, starting: dist.ProcessGroup, control: dist.ProcessGroup) -> None:
        self.rank = args.rank
        self.world_size = args.world_size
        self.sums_in_order = False
        """Whether sums over the ranks are in their order on every device."""
        self._args = args
        self._starting = starting
        self._channel: Channel = NetworkChannel(control)
        self._sent_tables = SentTables()
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
            store = meeting.store if isinstance(meeting, GroupStore) else connect_store(meeting, timeout)
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

    @property
    def gpu_index(self) -> int | None:
        """Index of this rank's GPU among those that its process sees; None: the current one."""
        return self._args.gpu_index

    @property
    def draws_apart(self) -> bool:
        """Whether ranks draw from the logits that each has."""
        own = self._args.draws_apart
        return self._args.device_type == "cuda" if own is None else own

    def start(self, choices: Mapping[str, object]) -> None:
        """Waits until every rank is ready to run; then the leader begins to beat.

        Args:
            choices: what this rank chose for itself and the others must have chosen too. What the leader
                says of blocks means other tokens to a rank whose blocks are of another size.

        Raises:
            EngineLostError: a rank did not come within ``start_timeout_s``.
            ConfigError: the ranks chose differently; the message names what, and who chose what.
        """
        everyones = self._gather(dict(choices))
        check_same_choices(everyones)
        self._choose_channel()
        if self.rank == 0:
            self._beating = threading.Thread(target=self._beat, name="specray-group-beat", daemon=True)
            self._beating.start()

    def _choose_channel(self) -> None:
        args = self._args
        shares_memory = args.device_type == "cuda" if args.shares_memory is None else args.shares_memory
        if not shares_memory:
            return
        timeout = timedelta(seconds=args.silence_timeout_s)
        try:
            shared = shared_channel(self.rank, self.world_size, self._starting, timeout)
        except RuntimeError as error:
            raise EngineLostError(f"the group did not start: {error}") from None
        self._channel = shared or self._channel

    def least(self, value: int) -> int:
        """The least of the ranks' values; every rank asks. Raises EngineLostError as ``start`` does."""
        return min(self._gather(value))

    def leaders(self, value: T | None = None) -> T:
        """The leader's value, which the others do not have; every rank asks.

        Raises:
            EngineLostError: as ``start`` does.
        """
        found = self._gather(value)[0]
        assert found is not None, "the leader has one"
        return found

    def _gather(self, value: T) -> list[T]:
        """Everyone's values, by rank, while the group starts. Raises EngineLostError as ``start`` does."""
        everyones = [value] * self.world_size
        try:
            dist.monitored_barrier(
                group=self._starting, timeout=timedelta(seconds=self._args.start_timeout_s)
            )
            dist.all_gather_object(everyones, value, group=self._starting)
        except RuntimeError as error:
            raise EngineLostError(f"the group did not start: {error}") from None
        return everyones

    def send_step(self, inputs: Sequence[SequenceInput], moves: Moves = NO_MOVES) -> None:
        """Leader: hands a step to the other ranks. Raises EngineLostError when one is gone."""
        self._send(_Kind.STEP, self._sent_tables.encode(inputs), moves)

    def send_draws(self, inputs: Sequence[SequenceInput], draws: list[int], moves: Moves = NO_MOVES) -> None:
        self._send(_Kind.DRAW, [len(draws), *draws, *self._sent_tables.encode(inputs)], moves)

    def send_copy(self, copy: CopyInput, moves: Moves = NO_MOVES) -> None:
        """Leader: hands a copy to the other ranks. Raises EngineLostError when one is gone."""
        self._send(_Kind.COPY, encode_copy(copy), moves)

    def send_state_copy(self, copy: StateCopy) -> None:
        """Leader: hands a copy of states to the other ranks. Raises EngineLostError when one is gone."""
        self._send(_Kind.STATE, encode_state_copy(copy))

    def send_adapter(self, work: AdapterInput) -> None:
        """Leader: has the other ranks do something with adapters. Raises EngineLostError when one is gone."""
        self._send(_Kind.ADAPTER, encode_adapter(work))

    def receive_step(self) -> Received | None:
        """Follower: waits for the next message with work; None: the leader has closed.

        Raises:
            EngineLostError: the leader is gone, or was silent for ``silence_timeout_s``.
        """
        while True:
            kind, payload, moves = self._receive()
            if kind == _Kind.STEP:
                return Received(self._sent_tables.decode(payload), moves)
            if kind == _Kind.DRAW:
                end = 1 + payload[0]
                return Received(self._sent_tables.decode(payload[end:]), moves, payload[1:end])
            if kind == _Kind.COPY:
                return Received(decode_copy(payload), moves)
            if kind == _Kind.STATE:
                return Received(decode_state_copy(payload), moves)
            if kind == _Kind.ADAPTER:
                return Received(decode_adapter(payload), moves)
            if kind == _Kind.CLOSE:
                return None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, in place. Raises EngineLostError when one is gone.

        On CPU three ranks and more are summed in their order: a ring's order depends on where a number lies,
        and so a row's bits on how many rows there are.
        """
        if self.sums_in_order or (self.world_size > 2 and tensor.device.type == "cpu"):
            first, *others = self.exchange(tensor)
            total = first.float()
            for part in others:
                total += part
            return tensor.copy_(total)
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise EngineLostError(f"rank {self.rank} lost its group: {error}") from None
        return tensor

    def all_gather(self, columns: torch.Tensor, total: int) -> torch.Tensor:
        """Joins the ranks' columns, each ``[num_rows, <= ceil(total / world_size)]``.

        Returns:
            ``[num_rows, total]``, float32.
        """
        width = -(-total // self.world_size)
        mine = torch.nn.functional.pad(columns, (0, width - columns.shape[1])).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            dist.all_gather(parts, mine)
        except RuntimeError as error:
            raise EngineLostError(f"rank {self.rank} lost its group: {error}") from None
        joined = torch.empty(len(columns), total, dtype=torch.float32, device=columns.device)
        for first, part in zip(range(0, total, width), parts, strict=False):
            own = joined[:, first : first + width]
            own.copy_(part[:, : own.shape[1]])
        return joined

    def exchange(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers of all ranks, of which each has as many: ``[world_size, *shape]``."""
        parts = [torch.empty_like(numbers) for _ in range(self.world_size)]
        try:
            dist.all_gather(parts, numbers.contiguous())
        except RuntimeError as error:
            raise EngineLostError(f"rank {self.rank} lost its group: {error}") from None
        return torch.stack(parts)

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
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._is_closing.is_set():
                return
            try:
                self._channel.send(message)
            except RuntimeError as error:
                # What comes next would be taken for the rest of this message.
                self._failure = EngineLostError(f"rank {self.rank} lost its group: {error}")
                raise self._failure from None

    def _receive(self) -> tuple[int, list[int], Moves]:
        try:
            message = self._channel.receive()
        except RuntimeError as error:
            raise EngineLostError(f"rank {self.rank} lost its group: {error}") from None
        kind, payload_len, num_moves = message[:_HEADER_LEN]
        end = _HEADER_LEN + payload_len
        slots = message[end : end + 2 * num_moves]
        return kind, message[_HEADER_LEN:end], Moves(slots[:num_moves], slots[num_moves:])


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


def connect_store(address: str, timeout: timedelta) -> TCPStore:
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=timeout)
