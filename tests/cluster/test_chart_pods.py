"""The chart's pods: groups and labels, privileges, secrets, downloads, and what leaves them alone."""

from __future__ import annotations

import shutil
from pathlib import Path

from specray.config import parse_config
from tests.cluster.chart_harness import (
    BIG,
    CHART,
    DEFAULTS,
    IMAGE,
    RAY_SERVICE,
    Renderer,
    each_example,
    load,
    merged,
    pod_specs,
    ray_service,
)


def test_ranks_of_the_big_example_are_for_its_big_group_alone(helm: Renderer) -> None:
    config = parse_config(merged(DEFAULTS["config"], BIG["config"]))
    groups = {
        group["groupName"]: group for group in ray_service(helm, BIG)["rayClusterConfig"]["workerGroupSpecs"]
    }
    cpus = config.target.ray_actor_options["num_cpus"]
    assert config.target.ray_actor_options["label_selector"] == {"specray.io/group": "big"}
    limits = groups["big"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == config.target.tensor_parallel_size == 8
    assert float(limits["cpu"]) >= 8 * cpus
    ingress = config.ingress.ray_actor_options["num_cpus"]
    assert ingress <= float(groups["ingress"]["resources"]["CPU"]) < 2 * ingress


def test_groups_carry_labels_for_selectors(helm: Renderer) -> None:
    groups = ray_service(helm, BIG)["rayClusterConfig"]["workerGroupSpecs"]
    assert [group["labels"] for group in groups] == [
        {"specray.io/group": "ingress"},
        {"specray.io/group": "small", "ray.io/accelerator-type": "L4"},
        {"specray.io/group": "big", "ray.io/accelerator-type": "H100"},
    ]


def test_a_new_version_of_the_chart_leaves_the_pods_as_they_are(helm: Renderer, tmp_path: Path) -> None:
    values = merged(IMAGE, {"image": {"tag": "1"}})
    newer = shutil.copytree(CHART, tmp_path / "specray")
    text = (newer / "Chart.yaml").read_text()
    (newer / "Chart.yaml").write_text(text.replace("ersion: 0.1.0", "ersion: 0.2.0"))
    before, after = (helm.objects(values, chart=chart)[RAY_SERVICE] for chart in (CHART, newer))
    assert after["metadata"]["labels"]["helm.sh/chart"] == "specray-0.2.0"
    assert after["spec"] == before["spec"]


def test_a_change_of_the_configuration_leaves_the_pods_as_they_are(helm: Renderer) -> None:
    before = ray_service(helm, {})
    after = ray_service(helm, {"config": {"speculation": {"num_speculative_tokens": 3}}})
    assert after["serveConfigV2"] != before["serveConfigV2"]
    assert after["rayClusterConfig"] == before["rayClusterConfig"]


@each_example
def test_pods_are_unprivileged_and_end_with_grace(helm: Renderer, path: Path) -> None:
    for role, pod in pod_specs(ray_service(helm, load(path))).items():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["terminationGracePeriodSeconds"] == 90
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }, role
            mounts = {entry["name"]: entry["mountPath"] for entry in container["volumeMounts"]}
            assert (mounts["tmp"], mounts["home"]) == ("/tmp", "/home/specray")
        assert {"name": "tmp", "emptyDir": {}} in pod["volumes"]
        assert {"name": "home", "emptyDir": {}} in pod["volumes"]
        environment = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
        assert environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "60"


def test_only_a_head_with_an_autoscaler_talks_to_kubernetes(helm: Renderer) -> None:
    for enabled in (True, False):
        spec = ray_service(helm, {"autoscaler": {"enabled": enabled}})
        tokens = {role: pod["automountServiceAccountToken"] for role, pod in pod_specs(spec).items()}
        assert tokens == {"head": enabled, "workers": False}
        options = spec["rayClusterConfig"].get("autoscalerOptions", {})
        assert options.get("version") == ("v2" if enabled else None)
        if enabled:
            assert options["securityContext"]["readOnlyRootFilesystem"] is True
            assert {"name": "tmp", "mountPath": "/tmp"} in options["volumeMounts"]


def test_secrets_are_named_and_never_made(helm: Renderer) -> None:
    objects = helm.objects(BIG)
    assert [kind for kind, _ in objects if kind == "Secret"] == []
    cluster = objects[RAY_SERVICE]["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "specray-ray-token"}
    assert cluster["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.databases:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "specray-redis", "key": "redis-password"}}},
    }


def test_secrets_are_files_in_workers_alone(helm: Renderer) -> None:
    pods = pod_specs(ray_service(helm, {"secretMounts": [{"name": "specray-tls", "path": "/etc/tls"}]}))
    mount = {"name": "secret-0", "mountPath": "/etc/tls", "readOnly": True}
    assert mount in pods["workers"]["containers"][0]["volumeMounts"]
    secret = {"secretName": "specray-tls", "defaultMode": 0o440}
    assert {"name": "secret-0", "secret": secret} in pods["workers"]["volumes"]
    assert [volume["name"] for volume in pods["head"]["volumes"]] == ["tmp", "home"]


def test_each_group_has_its_disruption_budget(helm: Renderer) -> None:
    budgets = {
        name: (doc["spec"]["maxUnavailable"], doc["spec"]["selector"]["matchLabels"])
        for (kind, name), doc in helm.objects(BIG).items()
        if kind == "PodDisruptionBudget"
    }
    own = {"specray.io/service": "demo-specray"}
    assert budgets == {
        "demo-specray-head": (0, {**own, "ray.io/node-type": "head"}),
        **{
            f"demo-specray-{name}": (1, {**own, "ray.io/group": name}) for name in ("ingress", "small", "big")
        },
    }


def test_a_download_goes_to_the_groups_that_need_it(helm: Renderer) -> None:
    values = merged(IMAGE, {"models": {"tokenSecret": {"name": "hub"}, "sizeLimit": "9Gi"}})
    values["workerGroups"] = [{"name": name, "replicas": 1, "resources": {}} for name in ("a", "b")]
    values["config"] = {"ingress": {"ray_actor_options": {"label_selector": {"specray.io/group": "a"}}}}
    values["models"]["download"] = [
        {"name": "target", "repository": "org/model", "revision": "c0ffee", "groups": ["b"]},
        {
            "name": "target",
            "repository": "org/model",
            "revision": "c0ffee",
            "include": ["*.json"],
            "groups": ["a"],
        },
        {"name": "draft", "repository": "org/small", "revision": "1"},
    ]
    pods = pod_specs(ray_service(helm, values))
    assert "initContainers" not in pods["head"]
    command = ["hf", "download", "org/model", "--revision=c0ffee", "--local-dir=/models/target"]
    draft = ["hf", "download", "org/small", "--revision=1", "--local-dir=/models/draft"]
    commands = {name: [start["command"] for start in pods[name]["initContainers"]] for name in ("a", "b")}
    assert commands == {"a": [[*command, "--include=*.json"], draft], "b": [command, draft]}
    (token,) = [entry for entry in pods["b"]["initContainers"][0]["env"] if entry["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    for name in ("a", "b"):
        (mount,) = [
            entry for entry in pods[name]["containers"][0]["volumeMounts"] if entry["name"] == "models"
        ]
        assert mount == {"name": "models", "mountPath": "/models", "readOnly": True}
        assert {"name": "models", "emptyDir": {"sizeLimit": "9Gi"}} in pods[name]["volumes"]
