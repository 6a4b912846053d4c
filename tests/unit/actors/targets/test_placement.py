"""Placement of a target's ranks on nodes, and their order."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from specray.actors.node import LocalProcess, interface_of
from specray.actors.targets.group import check_one_host
from specray.actors.targets.placement import NodeShape, fits, place_draft, place_group, rank_bundles
from specray.config import RpcConfig, TargetConfig, parse_config
from specray.environment import interface_environment, rank_environment
from specray.errors import ConfigError

BIG = NodeShape({"CPU": 16, "GPU": 8}, {"zone": "a", "ray.io/accelerator-type": "H100"})
SMALL = NodeShape({"CPU": 16, "GPU": 4}, {"zone": "b"})


def target(size: int = 8, placement: str = "auto", **options: Any) -> TargetConfig:
    return TargetConfig.model_validate(
        {
            "tensor_parallel_size": size,
            "placement": placement,
            "ray_actor_options": {"num_cpus": 1, "num_gpus": 1, **options},
        }
    )


@pytest.mark.parametrize(
    ("placement", "nodes", "strategy"),
    [
        ("auto", [SMALL, BIG], "STRICT_PACK"),
        ("auto", [SMALL, SMALL], "PACK"),
        ("auto", [], "PACK"),
        ("one-node", [], "STRICT_PACK"),
        ("nodes", [BIG], "PACK"),
    ],
)
def test_a_group_is_kept_within_a_node_where_it_fits_one(
    placement: str, nodes: list[NodeShape], strategy: str
) -> None:
    group = place_group(target(placement=placement), router_cpus=0.1, nodes=nodes)
    assert group.strategy == strategy
    assert group.bundles == [{"CPU": 0.1}, *([{"CPU": 1, "GPU": 1}] * 8)]
    assert group.label_selectors == [{}] * 9


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("cuda", {}, {"CPU": 1, "GPU": 1.0}),
        ("cuda", {"num_gpus": 0.3}, {"CPU": 1, "GPU": 0.3}),
        ("cuda", {"num_gpus": 0}, {"CPU": 1}),
        ("auto", {}, {"CPU": 1}),
        ("cpu", {}, {"CPU": 1}),
    ],
)
def test_a_rank_on_cuda_asks_for_a_gpu_unless_told_otherwise(
    device: str, options: dict[str, Any], expected: dict[str, float]
) -> None:
    config = {"device": device, "ray_actor_options": options}
    group = place_group(TargetConfig.model_validate(config), router_cpus=0.1, nodes=[])
    assert group.bundles == [{"CPU": 0.1}, expected]


def test_the_router_needs_its_share_of_the_node_too() -> None:
    bundles = place_group(target(), router_cpus=0.1, nodes=[]).bundles
    assert fits(bundles, {}, NodeShape({"CPU": 8.1, "GPU": 8}, {}))
    assert not fits(bundles, {}, NodeShape({"CPU": 8, "GPU": 8}, {}))


def test_options_of_ranks_become_bundles_and_labels() -> None:
    options = {
        "memory": 1000,
        "resources": {"nic": 2},
        "accelerator_type": "H100",
        "label_selector": {"zone": "a"},
    }
    group = place_group(target(2, **options), router_cpus=0.1, nodes=[BIG])
    rank = {"CPU": 1, "GPU": 1, "memory": 1000, "nic": 2}
    assert group.bundles == [{"CPU": 0.1}, rank, rank]
    assert group.label_selectors == [{"zone": "a", "ray.io/accelerator-type": "H100"}] * 3
    assert group.strategy == "PACK", "no node has a nic"


@pytest.mark.parametrize(
    ("nodes", "strategy"),
    [([NodeShape({"CPU": 2, "GPU": 1}, {})], "STRICT_PACK"), ([SMALL], "STRICT_PACK"), ([], "PACK")],
)
def test_a_draft_of_several_ranks_has_a_bundle_for_each_and_none_beside(
    nodes: list[NodeShape], strategy: str
) -> None:
    draft = {"tensor_parallel_size": 4, "ray_actor_options": {"num_gpus": 0.25}}
    group = place_draft(parse_config({"draft": draft}).draft, nodes=nodes)
    assert (group.bundles, group.strategy) == ([{"CPU": 0.5, "GPU": 0.25}] * 4, strategy)


@pytest.mark.parametrize(
    ("wanted", "is_big", "is_small"),
    [("a", True, False), ("!a", False, True), ("in(a, c)", True, False), ("!in(a,b)", False, False)],
)
def test_labels_are_matched_by_rays_rules(wanted: str, is_big: bool, is_small: bool) -> None:
    assert [fits([], {"zone": wanted}, node) for node in (BIG, SMALL)] == [is_big, is_small]


def test_an_option_that_is_not_a_ranks_to_choose_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"ray_actor_options has max_restarts; allowed for ranks: num_cpus"):
        parse_config({"target": {"ray_actor_options": {"max_restarts": 3}}})
    options = {"ray_actor_options": {"runtime_env": {}}}
    assert parse_config({"draft": options}).draft.ray_actor_options == {"runtime_env": {}}
    with pytest.raises(ConfigError, match=r"draft: .*ray_actor_options has runtime_env; allowed for ranks:"):
        parse_config({"draft": {**options, "tensor_parallel_size": 2}})
    with pytest.raises(ConfigError, match=r"draft\.tensor_parallel_size: .*greater than or equal to 1"):
        parse_config({"draft": {"tensor_parallel_size": 0}})


@pytest.mark.parametrize(
    ("nodes", "bundles"),
    [
        # Bundle 0 is the Router's.
        (["x", "x", "x"], [1, 2]),
        (["x", "y", "x", "y", "x"], [2, 4, 1, 3]),
        (["x", "y", "y", "x", "y"], [3, 1, 2, 4]),
        (["x", "y", "z", "z"], [2, 3, 1]),
        (["x", "z", "y", "z", "y"], [2, 4, 1, 3]),
    ],
    ids=["one node", "interleaved", "own first though smaller", "no own: largest first", "tie: by name"],
)
def test_ranks_are_ordered_by_node(nodes: list[str], bundles: list[int]) -> None:
    assert rank_bundles(dict(enumerate(nodes)), len(nodes) - 1) == bundles


def test_ranks_on_several_machines_cannot_meet_on_loopback() -> None:
    nodes = [
        {"NodeID": name, "NodeManagerAddress": address}
        for name, address in [("x", "10.0.0.1"), ("y", "10.0.0.1"), ("z", "10.0.0.2")]
    ]
    check_one_host({"x", "y"}, nodes, role="target")
    with pytest.raises(ConfigError, match=r"on 10\.0\.0\.1, 10\.0\.0\.2; allowed: 'node'"):
        check_one_host({"x", "z"}, nodes, role="target")


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are found on Linux")
def test_a_group_meets_on_the_interface_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None
    assert interface_environment("eth7") == {"GLOO_SOCKET_IFNAME": "eth7"}, "what the user has set stays"
    assert rank_environment(RpcConfig(listen="loopback"))["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(RpcConfig(listen="node", allow_insecure=True))


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="descriptors of processes are Linux's")
def test_a_stopped_process_is_ended_and_one_that_has_gone_is_left_alone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(child.pid, signal.SIGSTOP)
    process, again = LocalProcess(child.pid), LocalProcess(child.pid)
    process.kill()
    assert child.wait(10) == -signal.SIGKILL
    process.kill()
    again.kill()
    with pytest.raises(OSError, match="No such process"):
        LocalProcess(child.pid)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="descriptors of processes are Linux's")
def test_the_end_of_a_process_is_waited_for_and_of_one_that_hangs_not_for_ever() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process, killer = LocalProcess(child.pid), LocalProcess(child.pid)

    async def main() -> None:
        await process.wait(0.01)
        assert child.poll() is None
        async with asyncio.timeout(10):
            waiting = asyncio.create_task(process.wait(1000))
            await asyncio.sleep(0)
            killer.kill()
            await waiting
            await process.wait(1000)
            await killer.wait(1000)

    asyncio.run(main())
    process.kill()
    assert child.wait(10) == -signal.SIGKILL
