"""What the ranks of a test's group do, each in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any

import torch

from specray.engine.group.parallel import GroupArgs, GroupStore, ParallelContext
from specray.engine.inputs import SequenceInput
from specray.errors import ConfigError, EngineLostError
from tests.unit.engine.processes import preloaded_context

DEADLINE_S = 40.0
Ranks = list[BaseProcess]


@contextmanager
def running_ranks(
    target: Callable[..., None], *args: Any, num_ranks: int = 2
) -> Iterator[tuple[Ranks, Queue[Any]]]:
    """Processes, which meet in a queue, and the queue of their answers."""
    context = preloaded_context()
    meeting: Queue[str] = context.Queue()
    answers: Queue[Any] = context.Queue()
    ranks: Ranks = [
        context.Process(target=target, args=(rank, meeting, answers, *args)) for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    try:
        yield ranks, answers
    finally:
        for process in ranks:
            process.kill()
            process.join(DEADLINE_S)


def answers_of_ranks(
    target: Callable[..., None], *args: Any, count: int = 1, num_ranks: int = 2
) -> list[Any]:
    """That many answers of the ranks, all of which end without a failure."""
    with running_ranks(target, *args, num_ranks=num_ranks) as (ranks, answers):
        received = [answers.get(timeout=DEADLINE_S) for _ in range(count)]
        end_well(ranks)
    return received


def end_well(ranks: Ranks) -> None:
    for process in ranks:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in ranks] == [0] * len(ranks)


def join(rank: int, meeting: Queue[str], *, world_size: int = 2, **options: Any) -> ParallelContext:
    """Rank 0 opens the store and says where; the others come. Options are fields of ``GroupArgs``."""
    torch.set_num_threads(1)
    args = GroupArgs(rank, world_size, "cpu", start_timeout_s=DEADLINE_S, **options)
    if rank > 0:
        return ParallelContext.join(args, meeting.get(timeout=DEADLINE_S))
    store = GroupStore("127.0.0.1", timeout_s=DEADLINE_S)
    for _ in range(world_size - 1):
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
