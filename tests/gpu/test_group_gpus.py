"""What only two GPUs of one node can show: ranks that see both reach each other's memory."""

from __future__ import annotations

from multiprocessing.queues import Queue
from typing import Any

import pytest
import torch

from specray.actors.targets.place import place_among
from specray.actors.workers import join_group, take_place
from specray.config import parse_config
from specray.engine.device import visible_gpus
from specray.engine.group.parallel import GroupStore
from tests.unit.engine.processes import preloaded_context

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices"),
]
DEADLINE_S = 120.0
CONFIG = parse_config(
    {
        "target": {"device": "cuda", "tensor_parallel_size": 2},
        "router": {"start_timeout_s": DEADLINE_S},
    }
)
NUM_ENTRIES = 8192


def _run(rank: int, meeting: Queue[str], answers: Queue[Any]) -> None:
    """One rank: sums over the group, plainly and through symmetric memory, and says what it got."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    place = place_among(rank, visible_gpus()[:2])
    take_place(place)
    store: GroupStore | str
    if rank:
        store = meeting.get(timeout=DEADLINE_S)
    else:
        store = GroupStore("127.0.0.1", timeout_s=DEADLINE_S)
        meeting.put(store.address)
    group = join_group(CONFIG, "target", rank, store, place)
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        own = torch.full((NUM_ENTRIES,), 1.5 + rank, dtype=torch.bfloat16, device=device)
        plain = group.all_reduce(own.clone())
        buffer = symmetric.empty(NUM_ENTRIES, dtype=torch.bfloat16, device=device)
        assert dist.group.WORLD is not None
        name = dist.group.WORLD.group_name
        symmetric.rendezvous(buffer, name)
        buffer.copy_(own)
        summed = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", name)
        answers.put((rank, device.index, plain.unique().tolist(), torch.equal(summed, plain)))
    except RuntimeError as error:
        answers.put((rank, str(error)))
    finally:
        group.close()


def test_ranks_of_two_gpus_sum_and_reach_each_others_memory() -> None:
    context = preloaded_context()
    meeting, answers = context.Queue(), context.Queue()
    ranks = [context.Process(target=_run, args=(rank, meeting, answers)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        got = sorted(answers.get(timeout=DEADLINE_S) for _ in ranks)
    finally:
        for rank in ranks:
            rank.join(DEADLINE_S)
            rank.kill()
    assert got == [(0, 0, [4.0], True), (1, 1, [4.0], True)]
