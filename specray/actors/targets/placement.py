"""Placement of tensor-parallel groups: the bundles of one placement group, and the order of ranks by node."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray

from specray.config import DraftConfig, EngineConfig, TargetConfig

Bundle = dict[str, float]
Strategy = Literal["STRICT_PACK", "PACK"]

FIRST_RANK_BUNDLE = 1
"""Bundle of the first rank actor. Bundle 0 is the owner's: a Router, or a Draft replica, which is rank 0."""


@dataclass(frozen=True, slots=True)
class NodeShape:
    """Total resources and labels of a node, whether in use or not."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """The placement group of a Router or a Draft replica, in Serve's terms."""

    bundles: list[Bundle]
    """Bundles: the owner's, then one for each rank that is an actor."""
    labels: dict[str, str]
    """Labels that every bundle's node must have; empty: any node."""
    strategy: Strategy

    @property
    def label_selectors(self) -> list[dict[str, str]]:
        """Label selectors, one per bundle."""
        return [self.labels] * len(self.bundles)


def place_group(target: TargetConfig, *, router_cpus: float, nodes: Sequence[NodeShape]) -> GroupPlacement:
    """Plans the placement group of one Router and its ranks; on which nodes, see :func:`place_draft`."""
    return _placed(target, [{"CPU": router_cpus}, *_rank_bundles_of(target)], nodes)


def place_draft(draft: DraftConfig, *, nodes: Sequence[NodeShape]) -> GroupPlacement:
    """Plans the placement group of one Draft replica, which is rank 0, and the other ranks.

    ``auto`` keeps the group within one node if some node of ``nodes`` is large enough, even when busy:
    waiting for a node is better than ranks that communicate over a network, which are many times slower. If
    there is no such node, the group spreads over as few as possible.
    """
    return _placed(draft, _rank_bundles_of(draft), nodes)


def _rank_bundles_of(ranks: EngineConfig) -> list[Bundle]:
    return [rank_bundle(ranks) for _ in range(ranks.tensor_parallel_size)]


def _placed(ranks: EngineConfig, bundles: list[Bundle], nodes: Sequence[NodeShape]) -> GroupPlacement:
    labels = rank_labels(ranks)
    is_one_node = ranks.placement == "one-node" or (
        ranks.placement == "auto" and any(fits(bundles, labels, node) for node in nodes)
    )
    return GroupPlacement(bundles, labels, "STRICT_PACK" if is_one_node else "PACK")


def rank_bundle(ranks: EngineConfig) -> Bundle:
    """Bundle of resources that one rank of a target or a draft reserves."""
    options = ranks.ray_actor_options
    num_cpus = 0.5 if isinstance(ranks, DraftConfig) else 1.0
    bundle: Bundle = {"CPU": options.get("num_cpus", num_cpus)}
    if ranks.num_gpus:
        bundle["GPU"] = ranks.num_gpus
    if options.get("memory"):
        bundle["memory"] = options["memory"]
    return {**bundle, **options.get("resources", {})}


def actor_options(bundle: Bundle) -> dict[str, Any]:
    """Ray options of an actor that takes a whole bundle."""
    resources = dict(bundle)
    return {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        **({"memory": resources.pop("memory")} if "memory" in resources else {}),
        **({"resources": resources} if resources else {}),
    }


def rank_labels(ranks: EngineConfig) -> dict[str, str]:
    """Labels that a rank's node must have."""
    options = ranks.ray_actor_options
    labels = dict(options.get("label_selector", {}))
    if options.get("accelerator_type"):
        labels["ray.io/accelerator-type"] = options["accelerator_type"]
    return labels


def fits(bundles: Sequence[Bundle], labels: Mapping[str, str], node: NodeShape) -> bool:
    """Whether the node could hold all the bundles if nothing else ran on it."""
    needed: Counter[str] = Counter()
    for bundle in bundles:
        needed.update(bundle)
    has_room = all(node.resources.get(name, 0) >= amount for name, amount in needed.items())
    return has_room and all(_matches(wanted, node.labels.get(key)) for key, wanted in labels.items())


def _matches(wanted: str, value: str | None) -> bool:
    """Matches one label by Ray's rules: ``v``, ``!v``, ``in(v,w)``, ``!in(v,w)``."""
    if found := re.fullmatch(r"(!?)in\((.*)\)", wanted):
        values = {item.strip() for item in found[2].split(",")}
        return (value in values) is not bool(found[1])
    if wanted.startswith("!"):
        return value != wanted[1:]
    return value == wanted


def ray_nodes() -> list[NodeShape]:
    """Nodes of this process's cluster; empty outside a cluster."""
    if not ray.is_initialized():
        return []
    return [NodeShape(node["Resources"], node["Labels"]) for node in ray.nodes() if node["Alive"]]


def rank_bundles(bundle_nodes: Mapping[int, str], num_ranks: int) -> list[int]:
    """Returns the bundles of rank actors in rank order: by node, the owner's node first.

    Ray may place bundles in any order. Ranks of one node must be consecutive, so that their traffic stays off
    the network; a target's leader is on the Router's node if a rank is there, else on the node with most
    ranks.

    Args:
        bundle_nodes: node id of each bundle, the owner's included.
        num_ranks: number of rank actors: all ranks of a target, all but the first of a draft.
    """
    ranks = range(FIRST_RANK_BUNDLE, FIRST_RANK_BUNDLE + num_ranks)
    sizes = Counter(bundle_nodes[bundle] for bundle in ranks)
    own = bundle_nodes[0]

    def key(bundle: int) -> tuple[bool, int, str, int]:
        node = bundle_nodes[bundle]
        return node != own, -sizes[node], node, bundle

    return sorted(ranks, key=key)
