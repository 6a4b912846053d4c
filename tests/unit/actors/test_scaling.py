"""Autoscaling policies: numbers of drafts and routers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from specray.actors.scaling import (
    DraftScalingPolicy,
    RouterScalingPolicy,
    draft_replicas,
    num_drafts,
    num_routers,
    router_replicas,
)
from specray.config import parse_config
from specray.errors import ConfigError
from specray.serving.app import build_app, num_cpus


@dataclass(frozen=True)
class Context:
    running_replicas: Sequence[Hashable]
    aggregated_metrics: Mapping[str, Mapping[Hashable, float]] | None = field(default_factory=dict)
    target_num_replicas: int = 1


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        ([0.6], 1),
        ([0.61], 2),
        ([1.0], 2),
        ([1.0, 1.0, 1.0], 5),
        ([0.3, 0.29], 2),
        ([0.3, 0.18], 1),
        ([0.24, 0.24, 0.24], 2),
        ([0.1], 1),
        ([0.004, 0.003], 0),
        ([None], 1),
        ([None, None], 2),
        ([1.0, None], 3),
        ([0.0, None], 2),
    ],
)
def test_drafts_follow_their_busy_share_and_shrink_only_with_a_margin(
    shares: list[float | None], wanted: int
) -> None:
    assert num_drafts(shares, [8.0] * len(shares), target=0.6) == wanted


def test_number_of_drafts_is_stable_under_a_constant_load() -> None:
    for load in (0.05, 0.5, 0.95, 1.7, 3.3):
        num, seen = 1, []
        for _ in range(6):
            num = num_drafts([load / num] * num, [10.0] * num, target=0.6)
            seen.append(num)
        assert len(set(seen[1:])) == 1, (load, seen)


def test_more_drafts_than_routers_help_nobody() -> None:
    assert num_drafts([1.0], [1.0], target=0.6) == 1
    assert num_drafts([1.0], [2.0], target=0.6) == 2
    assert num_drafts([1.0, 0.9], [2.0, 1.0], target=0.3) == 3
    assert num_drafts([1.0], [None], target=0.6) == 2


@pytest.mark.parametrize(
    ("occupancies", "queued", "wanted"),
    [
        ([0.0], [0.0], 1),
        ([1.0], [0.0], 1),
        ([1.0], [1.0], 2),
        ([1.0], [1000.0], 2),
        ([1.0], [1001.0], 3),
        ([1.0, 1.0], [500.0, 700.0], 4),
        ([0.45, 0.45], [0.0, 0.0], 2),
        ([0.4, 0.4], [0.0, 0.0], 1),
        ([0.4, None], [0.0, None], 2),
        ([None], [None], 1),
    ],
)
def test_routers_follow_what_runs_and_what_waits(
    occupancies: list[float | None], queued: list[float | None], wanted: int
) -> None:
    assert num_routers(occupancies, queued, target_queued_tokens=1000) == wanted


def test_policies_read_what_replicas_record() -> None:
    drafts = Context(["a", "b"], {"busy_share": {"a": 1.0, "b": 0.8, "gone": 1.0}, "num_routers": {"a": 9.0}})
    assert DraftScalingPolicy(target_busy_share=0.6)(drafts) == (3, {})
    routers = Context(["a"], {"occupancy": {"a": 1.0}, "queued_tokens": {"a": 4096.0}})
    assert RouterScalingPolicy(target_queued_tokens=4096)(routers) == (2, {})


@pytest.mark.parametrize("policy", [DraftScalingPolicy(0.6), RouterScalingPolicy(1000)])
def test_policies_keep_the_target_without_replicas_and_the_number_without_measurements(policy: Any) -> None:
    assert policy(Context([], {}, target_num_replicas=0)) == (0, {})
    assert policy(Context([], None, target_num_replicas=3)) == (3, {})
    assert policy(Context(["a", "b"], None)) == (2, {})
    assert policy(Context(["a", "b"], {})) == (2, {})


def test_serve_takes_the_policies_with_their_settings() -> None:
    config = parse_config(
        {
            "draft": {"autoscaling": {"min_replicas": 0, "max_replicas": 4, "target_busy_share": 0.5}},
            "router": {"autoscaling": {"max_replicas": 3, "target_queued_tokens": 77, "look_back_s": 12}},
        }
    )
    for options, kwargs, look_back_s in (
        (draft_replicas(config.draft), {"target_busy_share": 0.5}, 30.0),
        (router_replicas(config.router), {"target_queued_tokens": 77}, 12.0),
    ):
        assert "num_replicas" not in options
        scaling = AutoscalingConfig.model_validate(options["autoscaling_config"])
        policy = scaling.policy.get_policy()
        assert scaling.policy.policy_kwargs == kwargs
        assert scaling.look_back_period_s == look_back_s
        assert policy(**kwargs)(Context([], {}, target_num_replicas=2)) == (2, {})
    assert config.draft.scales_to_none


def test_fixed_numbers_stay_the_default() -> None:
    config = parse_config({"draft": {"num_replicas": 3}})
    assert draft_replicas(config.draft) == {"num_replicas": 3}
    assert router_replicas(config.router) == {"num_replicas": 1}
    assert not config.draft.scales_to_none


def deployments(values: dict[str, Any]) -> dict[str, Any]:
    """All deployments of the application by name."""
    found: dict[str, Any] = {}
    waiting = [build_app(values)]
    while waiting:
        app = waiting.pop()
        deployment = app._bound_deployment
        found[deployment.name] = deployment
        waiting += [each for each in deployment.init_args if type(each) is type(app)]
    return found


def test_drafts_go_where_their_labels_say_on_a_part_of_a_gpu() -> None:
    options = {"num_gpus": 0.25, "label_selector": {"ray.io/accelerator-type": "L4"}}
    draft = deployments({"draft": {"ray_actor_options": options, "num_replicas": 2}})["Draft"]
    assert draft.num_replicas == 2
    assert draft.ray_actor_options["num_gpus"] == 0.25
    assert draft.ray_actor_options["label_selector"] == {"ray.io/accelerator-type": "L4"}


def test_a_draft_on_cuda_asks_for_a_gpu_unless_told_otherwise() -> None:
    def num_gpus(draft: dict[str, Any]) -> float | None:
        return deployments({"draft": draft})["Draft"].ray_actor_options.get("num_gpus")

    assert num_gpus({"device": "cuda"}) == 1.0
    assert num_gpus({"device": "cuda", "ray_actor_options": {"num_gpus": 0.5}}) == 0.5
    assert num_gpus({"device": "auto"}) in (None, 0)


def test_a_draft_has_the_users_runtime_env_and_no_other() -> None:
    given = {"working_dir": "s3://bucket/x.zip", "env_vars": {"HF_HOME": "/m"}}
    draft = deployments({"draft": {"ray_actor_options": {"runtime_env": given}}})["Draft"]
    assert draft.ray_actor_options["runtime_env"] == given
    # Ray would start a process for it that imports Ray twice.
    for values in ({}, {"draft": {"tensor_parallel_size": 2}}):
        assert not deployments(values)["Draft"].ray_actor_options.get("runtime_env")


def test_ranks_of_a_draft_are_in_their_replicas_placement_group() -> None:
    options = {"num_cpus": 1, "num_gpus": 0.6, "accelerator_type": "L4", "resources": {"nic": 1}}
    values = {"draft": {"tensor_parallel_size": 3, "ray_actor_options": options, "placement": "one-node"}}
    draft = deployments(values)["Draft"]
    config = draft._replica_config
    rank = {"CPU": 1, "GPU": 0.6, "nic": 1}
    # The first is the replica itself.
    assert config.placement_group_bundles == [rank] * 3
    assert config.placement_group_strategy == "STRICT_PACK"
    assert config.placement_group_bundle_label_selector == [{"ray.io/accelerator-type": "L4"}] * 3
    own = {key: draft.ray_actor_options[key] for key in ("num_cpus", "num_gpus", "resources")}
    assert own == {"num_cpus": 1, "num_gpus": 0.6, "resources": {"nic": 1}}
    assert "accelerator_type" not in draft.ray_actor_options
    assert deployments({})["Draft"]._replica_config.placement_group_bundles is None


def test_every_rank_of_every_draft_counts_among_the_cpus() -> None:
    values = {"draft": {"num_replicas": 2, "tensor_parallel_size": 4}}
    assert num_cpus(parse_config(values)) == pytest.approx(num_cpus(parse_config({})) + 0.5 * (2 * 4 - 1))


@pytest.mark.parametrize(
    ("draft", "has_draft"),
    [
        ({"num_replicas": 0}, False),
        ({"enabled": False}, False),
        ({"model": "ngram"}, False),
        ({"num_replicas": 0, "autoscaling": {"min_replicas": 0, "max_replicas": 2}}, True),
        ({}, True),
    ],
)
def test_there_is_a_draft_deployment_when_there_may_be_a_draft(
    draft: dict[str, Any], has_draft: bool
) -> None:
    assert ("Draft" in deployments({"draft": draft})) == has_draft


def test_routers_bring_a_target_each() -> None:
    one, two = ({"router": {"num_replicas": count}} for count in (1, 2))
    assert deployments(two)["Router"].num_replicas == 2
    assert num_cpus(parse_config(two)) == pytest.approx(num_cpus(parse_config(one)) + 1.1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"draft": {"autoscaling": {"min_replicas": 3, "max_replicas": 2}}}, "max_replicas is 2"),
        ({"draft": {"autoscaling": {"max_replicas": 2, "target_busy_share": 1.5}}}, "target_busy_share"),
        ({"router": {"autoscaling": {"min_replicas": 0, "max_replicas": 2}}}, "min_replicas"),
        ({"router": {"autoscaling": {"max_replicas": 2, "look_back_s": 10}}}, "look_back_s"),
        ({"router": {"num_replicas": 0}}, "num_replicas"),
    ],
)
def test_wrong_scaling_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(values)
