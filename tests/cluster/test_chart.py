"""Tests of the chart: every example renders, lints, is valid and has the right contents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from ray.serve import Application
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from specray.config import parse_config
from specray.serving.app import build_app
from tests.cluster.chart_harness import (
    CHART,
    CRDS,
    DEFAULTS,
    EXAMPLES,
    IMAGE,
    KEY,
    Renderer,
    RenderError,
    load,
    merged,
    strict_crd_schema,
)

BIG = load(CHART / "examples" / "one-small-eight-big.yaml")
RAY_SERVICE = ("RayService", "demo-specray")

each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def ray_service_validator() -> Draft7Validator:
    path = CRDS / "ray.io_rayservices.yaml"
    if not path.exists():
        pytest.skip("KubeRay's CRDs are not here")
    return Draft7Validator(strict_crd_schema(path))


def ray_service(helm: Renderer, values: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = helm.objects(merged(IMAGE, values))[RAY_SERVICE]["spec"]
    return spec


def pod_specs(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cluster = spec["rayClusterConfig"]
    groups = {group["groupName"]: group["template"]["spec"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"]["spec"], **groups}


def test_the_examples_are_one_gpu_small_and_big_gpus_and_cpu() -> None:
    assert [path.stem for path in EXAMPLES] == ["cpu", "one-gpu", "one-small-eight-big"]


@each_example
def test_an_example_lints_strictly(helm: Renderer, path: Path) -> None:
    assert helm.lint(load(path)) == []


@each_example
def test_an_example_is_a_valid_ray_service(
    helm: Renderer, ray_service_validator: Draft7Validator, path: Path
) -> None:
    manifest = helm.objects(load(path))[RAY_SERVICE]
    assert [error.message for error in ray_service_validator.iter_errors(manifest)] == []


def test_every_optional_part_is_valid(helm: Renderer, ray_service_validator: Draft7Validator) -> None:
    values = merged(BIG, {"gcsFaultTolerance": {"usernameKey": "user"}, "rayAuth": {"enabled": False}})
    values["image"] |= {"digest": "sha256:" + "0" * 64, "pullSecrets": ["registry"]}
    values |= {"secretMounts": [{"name": "specray-tls", "path": "/etc/tls"}]}
    values["workerGroups"][0] |= {"runtimeClassName": "nvidia", "idleTimeoutSeconds": 9, "minReplicas": 0}
    manifest = helm.objects(values)[RAY_SERVICE]
    assert [error.message for error in ray_service_validator.iter_errors(manifest)] == []


def test_the_validation_sees_a_misspelt_field(helm: Renderer, ray_service_validator: Draft7Validator) -> None:
    manifest = helm.objects(IMAGE)[RAY_SERVICE]
    manifest["spec"]["serveConfigV3"] = ""
    (error,) = ray_service_validator.iter_errors(manifest)
    assert error.message == "Additional properties are not allowed ('serveConfigV3' was unexpected)"


def with_draft_model(application: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration as the Draft deployment gets it."""
    values: dict[str, Any] = application["args"]
    for deployment in application.get("deployments", ()):
        assert deployment["name"] == "Draft"
        values = values | {"draft": values["draft"] | deployment["user_config"]["draft"]}
    return values


@each_example
def test_serve_gets_the_configuration_of_specray_serve(helm: Renderer, path: Path) -> None:
    values = merged(DEFAULTS["config"], load(path)["config"])
    objects = helm.objects(load(path))
    text = objects[RAY_SERVICE]["spec"]["serveConfigV2"]
    serve = yaml.safe_load(text)
    (application,) = serve["applications"]
    assert with_draft_model(application) == values
    assert parse_config(with_draft_model(application)) == parse_config(values)
    assert isinstance(build_app(application["args"]), Application)
    data = objects["ConfigMap", "demo-specray-config"]["data"]
    assert yaml.safe_load(data["config.yaml"]) == values
    assert yaml.safe_load(data["serve.yaml"]) == serve


def test_replicas_that_follow_the_load_are_the_configurations(helm: Renderer) -> None:
    values = {
        "config": {
            "draft": {"autoscaling": {"min_replicas": 0, "max_replicas": 4, "target_busy_share": 0.5}},
            "router": {"autoscaling": {"max_replicas": 3, "target_queued_tokens": 4096}},
            "telemetry": {"traces": "otlp", "endpoint": "http://collector:4318/v1/traces"},
        }
    }
    serve = yaml.safe_load(ray_service(helm, values)["serveConfigV2"])
    config = parse_config(serve["applications"][0]["args"])
    assert config.draft.autoscaling is not None and config.draft.autoscaling.max_replicas == 4
    assert config.router.autoscaling is not None and config.router.autoscaling.target_queued_tokens == 4096
    assert config.logging.format == "json"
    for part, wrong in (("draft", {"max_replicas": 0}), ("router", {"max_replicas": 2, "min_replicas": 0})):
        with pytest.raises(RenderError, match=f"config/{part}/autoscaling|config.{part}.autoscaling"):
            ray_service(helm, {"config": {part: {"autoscaling": wrong}}})


def test_another_draft_model_changes_the_draft_deployment_alone(helm: Renderer) -> None:
    before, after = (
        yaml.safe_load(
            ray_service(helm, {"config": {"draft": {"model": model, "dtype": "float32"}}})["serveConfigV2"]
        )
        for model in ("/models/one", "/models/other")
    )
    (one,), (other,) = before["applications"], after["applications"]
    assert one["args"] == other["args"]
    assert one["args"]["draft"]["dtype"] == "float32"
    assert other["deployments"] == [{"name": "Draft", "user_config": {"draft": {"model": "/models/other"}}}]


@pytest.mark.parametrize(
    "draft", [{"model": "ngram"}, {"model": "/m", "enabled": False}, {"model": "/m", "num_replicas": 0}, {}]
)
def test_without_a_draft_deployment_nothing_is_said_of_it(helm: Renderer, draft: dict[str, Any]) -> None:
    serve = yaml.safe_load(ray_service(helm, {"config": {"draft": draft}})["serveConfigV2"])
    (application,) = serve["applications"]
    assert "deployments" not in application
    assert application["args"].get("draft", {}) == draft


def test_serve_knows_every_key_of_its_file(helm: Renderer) -> None:
    serve = yaml.safe_load(
        ray_service(helm, {"config": {"router": {"request_timeout_s": 20}}})["serveConfigV2"]
    )
    ServeDeploySchema.model_validate(serve)
    assert set(serve) <= set(ServeDeploySchema.model_fields)
    assert set(serve["applications"][0]) <= set(ServeApplicationSchema.model_fields)
    assert serve["http_options"]["request_timeout_s"] == 50
    assert serve["http_options"]["port"] == 8000


def test_large_numbers_stay_integers(helm: Renderer) -> None:
    serve = yaml.safe_load(
        ray_service(helm, {"config": {"router": {"max_queued_tokens": 1_000_000}}})["serveConfigV2"]
    )
    assert parse_config(serve["applications"][0]["args"]).router.max_queued_tokens == 1_000_000


def test_without_grpc_groups_need_not_say_where_the_ingress_is(helm: Renderer) -> None:
    groups = [{"name": name, "replicas": 2, "resources": {}} for name in "ab"]
    objects = helm.objects(merged(IMAGE, {"workerGroups": groups, "config": {"grpc": {"port": 0}}}))
    assert [name for kind, name in objects if kind == "Service"] == []
    policy = objects["NetworkPolicy", "demo-specray"]
    assert [port["port"] for port in policy["spec"]["ingress"][2]["ports"]] == [8000]


def test_grpc_goes_to_the_group_of_the_ingress(helm: Renderer) -> None:
    service = helm.objects(BIG)["Service", "demo-specray-grpc"]
    assert service["spec"]["selector"] == {"specray.io/service": "demo-specray", "ray.io/group": "ingress"}
    assert [port["port"] for port in service["spec"]["ports"]] == [9000]


@pytest.mark.parametrize("wanted", ["a", "in(a)", "!in(b, c)", "in(a, x)"])
def test_selectors_of_one_group_put_the_ingress_into_it(helm: Renderer, wanted: str) -> None:
    values = {
        "workerGroups": [{"name": name, "replicas": 1, "resources": {}} for name in "abc"],
        "config": {"ingress": {"ray_actor_options": {"label_selector": {"specray.io/group": wanted}}}},
    }
    service = helm.objects(merged(IMAGE, values))["Service", "demo-specray-grpc"]
    assert service["spec"]["selector"]["ray.io/group"] == "a"


@pytest.mark.parametrize("wanted", ["in(workers,big)", "!small", "!in(small)", "workers"])
def test_selectors_that_a_worker_group_fits_are_passed_on(helm: Renderer, wanted: str) -> None:
    target = {"ray_actor_options": {"label_selector": {"specray.io/group": wanted}}}
    serve = yaml.safe_load(ray_service(helm, {"config": {"target": target}})["serveConfigV2"])
    assert serve["applications"][0]["args"]["target"] == target


@pytest.mark.parametrize("host", ["::", "0.0.0.0", "*"])
def test_host_is_a_string_to_serve(helm: Renderer, host: str) -> None:
    serve = yaml.safe_load(ray_service(helm, {"config": {"http": {"host": host}}})["serveConfigV2"])
    assert serve["http_options"]["host"] == serve["applications"][0]["args"]["http"]["host"] == host


def test_host_of_a_grpc_that_is_off_does_not_matter(helm: Renderer) -> None:
    values = {"config": {"grpc": {"port": 0, "host": "127.0.0.1"}, "http": {"server": "proxy"}}}
    serve = yaml.safe_load(ray_service(helm, values)["serveConfigV2"])
    assert serve["applications"][0]["args"]["http"]["server"] == "proxy"


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


def test_names_leave_room_for_what_kuberay_appends(helm: Renderer) -> None:
    ((_, name),) = [key for key in helm.objects(IMAGE, name="r" * 53) if key[0] == "RayService"]
    assert name == "r" * 47


@each_example
def test_pods_are_unprivileged_and_end_with_grace(helm: Renderer, path: Path) -> None:
    for role, pod in pod_specs(ray_service(helm, load(path))).items():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["terminationGracePeriodSeconds"] == 90
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }, role
        environment = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
        assert environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "60"


def test_only_a_head_with_an_autoscaler_talks_to_kubernetes(helm: Renderer) -> None:
    for enabled in (True, False):
        spec = ray_service(helm, {"autoscaler": {"enabled": enabled}})
        tokens = {role: pod["automountServiceAccountToken"] for role, pod in pod_specs(spec).items()}
        assert tokens == {"head": enabled, "workers": False}
        assert spec["rayClusterConfig"].get("autoscalerOptions", {}).get("version") == (
            "v2" if enabled else None
        )


def test_secrets_are_named_and_never_made(helm: Renderer) -> None:
    objects = helm.objects(BIG)
    assert [kind for kind, _ in objects if kind == "Secret"] == []
    cluster = objects[RAY_SERVICE]["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "specray-ray-token"}
    assert cluster["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.databases:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "specray-redis", "key": "redis-password"}}},
    }


def test_the_head_shows_every_port_that_is_scraped(helm: Renderer) -> None:
    objects = helm.objects(BIG)
    endpoints = {
        role: [
            endpoint["port"]
            for endpoint in objects["PodMonitor", f"demo-specray-{role}"]["spec"]["podMetricsEndpoints"]
        ]
        for role in ("head", "worker")
    }
    # The Router's metrics come from one pod; otherwise they would be counted twice.
    assert endpoints == {"head": ["metrics", "as-metrics", "dash-metrics", "serve"], "worker": ["metrics"]}
    pods = pod_specs(objects[RAY_SERVICE]["spec"])
    head = {port["name"] for port in pods.pop("head")["containers"][0]["ports"]}
    assert set(endpoints["head"]) <= head
    for pod in pods.values():
        assert [port["name"] for port in pod["containers"][0]["ports"]] == ["metrics", "serve", "grpc"]


def test_a_monitor_shows_the_key_only_where_one_is_asked_for(helm: Renderer) -> None:
    values = merged(BIG, {"config": {"auth": {"keys": [KEY]}}, "podMonitors": {"keySecret": {"name": "key"}}})
    monitor = helm.objects(values)["PodMonitor", "demo-specray-head"]
    shown = {entry["port"]: entry.get("authorization") for entry in monitor["spec"]["podMetricsEndpoints"]}
    key = {"type": "Bearer", "credentials": {"name": "key", "key": "api-key"}}
    assert shown == {"metrics": None, "as-metrics": None, "dash-metrics": None, "serve": key}
    open_paths = {"config": {"auth": {"keys": [KEY], "open_paths": ["/metrics"]}}}
    assert ("PodMonitor", "demo-specray-head") in helm.objects(merged(BIG, open_paths))


def test_secrets_are_files_in_workers_alone(helm: Renderer) -> None:
    pods = pod_specs(ray_service(helm, {"secretMounts": [{"name": "specray-tls", "path": "/etc/tls"}]}))
    mount = {"name": "secret-0", "mountPath": "/etc/tls", "readOnly": True}
    assert mount in pods["workers"]["containers"][0]["volumeMounts"]
    secret = {"secretName": "specray-tls", "defaultMode": 0o440}
    assert {"name": "secret-0", "secret": secret} in pods["workers"]["volumes"]
    assert "volumes" not in pods["head"]


def test_the_network_policy_lets_in_who_is_named_and_the_operator(helm: Renderer) -> None:
    rules = helm.objects(BIG)["NetworkPolicy", "demo-specray"]["spec"]["ingress"]
    own = {"podSelector": {"matchLabels": {"specray.io/service": "demo-specray"}}}
    ports = [[port["port"] for port in rule.get("ports", [])] for rule in rules]
    assert ports == [[], [8265, 52365, 8000], [8000, 9000], [8000, 8080, 44217, 44227]]
    namespaces = ["gateway", "monitoring"]
    assert rules[0]["from"] == [own]
    assert [rule["from"] for rule in rules[2:]] == [
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}] for name in namespaces
    ]
    rules = helm.objects(IMAGE)["NetworkPolicy", "demo-specray"]["spec"]["ingress"]
    assert [rule["from"] for rule in rules[2:]] == [[{"podSelector": {}}]]


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


def test_the_dashboard_is_the_file_of_the_chart(helm: Renderer) -> None:
    config_map = helm.objects(IMAGE)["ConfigMap", "demo-specray-dashboard"]
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    shipped = json.loads((CHART / "dashboards" / "specray.json").read_text())
    assert json.loads(config_map["data"]["specray.json"]) == shipped


def test_the_notes_say_where_to_call(helm: Renderer) -> None:
    notes = helm.files(IMAGE)["NOTES.txt"]
    assert "http://demo-specray-serve-svc.llm:8000/v1" in notes
    assert "demo-specray-grpc.llm:9000" in notes
    assert "which ask for nothing" not in notes


def test_the_notes_warn_of_engines_that_anybody_reaches(helm: Renderer) -> None:
    values = merged(IMAGE, {"networkPolicy": {"enabled": False}})
    assert "which ask for nothing" in helm.files(values)["NOTES.txt"]
    assert "which ask for nothing" not in helm.files(merged(BIG, values))["NOTES.txt"]
