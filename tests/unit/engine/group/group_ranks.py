"""What the ranks of a test's group do, each in a process of its own."""

from __future__ import annotations

import time
from multiprocessing.queues import Queue
from typing import Any

import torch

from specray.engine.group.parallel import GroupArgs, GroupStore, ParallelContext
from specray.engine.inputs import SequenceInput
from specray.errors import ConfigError, EngineLostError

DEADLINE_S = 40.0


def join(
    rank: int,
    meeting: Queue[str],
    *,
    silence_timeout_s: float,
    shares_memory: bool = False,
    draws_apart: bool = False,
) -> ParallelContext:
    """Rank 0 opens the store and says where; the other comes."""
    torch.set_num_threads(1)
    args = GroupArgs(
        rank,
        2,
        "cpu",
        start_timeout_s=DEADLINE_S,
        silence_timeout_s=silence_timeout_s,
        shares_memory=shares_memory,
        draws_apart=draws_apart,
    )
    if rank > 0:
        return ParallelContext.join(args, meeting.get(timeout=DEADLINE_S))
    store = GroupStore("127.0.0.1", timeout_s=DEADLINE_S)
    meeting.put(store.address)
    return ParallelContext.join(args, store)


def hang_or_die(rank: int, meeting: Queue[str], answers: Queue[Any], verb: str, shares_memory: bool) -> None:
    """The follower dies, or the leader hangs; the other says how it ended."""
    group = join(rank, meeting, silence_timeout_s=1, shares_memory=shares_memory)
    if rank == 0 and verb == "hang":
        # What a stuck leader looks like from outside: alive, connected, silent.
        group._is_closing.set()
    group.start({})
    if (rank, verb) == (1, "die"):
        return
    if (rank, verb) == (0, "hang"):
        time.sleep(DEADLINE_S)
        return
    try:
        while rank == 0:
            group.send_step([SequenceInput([5], 0, [0], 1)])
        group.receive_step()
    except EngineLostError as error:
        answers.put(f"rank {rank}: {error}")
    finally:
        group.close()


def start_differently(rank: int, meeting: Queue[str], answers: Queue[Any]) -> None:
    """The ranks meet with block sizes of their own, and say how that ended."""
    group = join(rank, meeting, silence_timeout_s=DEADLINE_S)
    try:
        group.start({"attention": "gather", "block_size": (256, 16)[rank]})
    except ConfigError as error:
        answers.put((rank, str(error)))
    finally:
        group.close()
