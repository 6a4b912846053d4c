"""GPUs of a group's ranks: none is shared, and ranks of one node see all of them.

Ray shows each rank its own GPU alone, so that all of them would be device 0. What ranks map into each other's
memory (NCCL's peers, torch's symmetric memory) goes by device, and refuses two of one index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from specray.errors import ConfigError


class RankProcess(NamedTuple):
    """Node, process and GPUs of a rank."""

    node_id: str
    pid: int
    gpu_ids: tuple[str, ...] = ()
    """GPU ids on its node that Ray assigned."""


class GpuPlace(NamedTuple):
    """What a rank of a group sees of its node's GPUs."""

    local_rank: int
    """Place among the ranks of its node."""
    gpus: tuple[str, ...]
    """GPUs that the rank sees, as CUDA_VISIBLE_DEVICES names them."""
    gpu_index: int
    """Index of its own GPU among them."""


def place_among(local_rank: int, gpus: Sequence[str]) -> GpuPlace:
    """The place of one rank of a node.

    Args:
        gpus: the GPU of each of the node's ranks.
    """
    own = gpus[local_rank]
    # Prefix of the name of a part of a GPU, of which a process sees one at most.
    if own.startswith("MIG-"):
        return GpuPlace(local_rank, (own,), 0)
    return GpuPlace(local_rank, tuple(gpus), local_rank)


def gpu_places(ranks: Sequence[RankProcess]) -> list[GpuPlace | None]:
    """The place of each rank of a group; None: it sees what Ray shows it.

    That is a rank without others, and ranks of a node to one of which Ray gave no GPU. Of several GPUs that
    Ray gave to one rank the first is its own.
    """
    if len(ranks) < 2:
        return [None] * len(ranks)
    places: list[GpuPlace | None] = []
    for rank, process in enumerate(ranks):
        peers = [other for other in ranks if other.node_id == process.node_id]
        local_rank = sum(other.node_id == process.node_id for other in ranks[:rank])
        gpus = [peer.gpu_ids[0] for peer in peers if peer.gpu_ids]
        places.append(place_among(local_rank, gpus) if len(gpus) == len(peers) else None)
    return places


def check_own_gpus(ranks: Sequence[RankProcess], *, role: str) -> None:
    """Checks that no two ranks share a GPU, which NCCL does not support.

    Raises:
        ConfigError: Ray gave several ranks the same GPU.
    """
    taken = Counter((rank.node_id, gpu_id) for rank in ranks for gpu_id in rank.gpu_ids)
    if taken and max(taken.values()) > 1:
        raise ConfigError(
            f"{role}.ray_actor_options: num_gpus is so small that several of the {role}'s ranks were given "
            "the same GPU; allowed: more than 0.5, so that each rank gets one that no other has"
        )
