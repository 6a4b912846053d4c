"""The chart as a whole: every example renders, lints and is valid; names, dashboard and notes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from tests.cluster.chart_harness import (
    BIG,
    CHART,
    CRDS,
    EXAMPLES,
    IMAGE,
    RAY_SERVICE,
    Renderer,
    each_example,
    load,
    merged,
    strict_crd_schema,
)


@pytest.fixture(scope="module")
def ray_service_validator() -> Draft7Validator:
    path = CRDS / "ray.io_rayservices.yaml"
    if not path.exists():
        pytest.skip("KubeRay's CRDs are not here")
    return Draft7Validator(strict_crd_schema(path))


def test_the_examples_are_cpu_gpus_one_secured_and_one_of_two_models() -> None:
    names = ["cpu", "one-gpu", "one-small-eight-big", "secured", "two-models"]
    assert [path.stem for path in EXAMPLES] == names


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


def test_names_leave_room_for_what_kuberay_appends(helm: Renderer) -> None:
    ((_, name),) = [key for key in helm.objects(IMAGE, name="r" * 53) if key[0] == "RayService"]
    assert name == "r" * 47


def test_the_dashboard_is_the_file_of_the_chart(helm: Renderer) -> None:
    config_map = helm.objects(IMAGE)["ConfigMap", "demo-specray-dashboard"]
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    shipped = json.loads((CHART / "dashboards" / "specray.json").read_text())
    assert json.loads(config_map["data"]["specray.json"]) == shipped


def test_the_notes_say_where_to_call(helm: Renderer) -> None:
    notes = helm.files(IMAGE)["NOTES.txt"]
    assert "http://demo-specray-serve-svc.llm:8000/v1" in notes
    assert "demo-specray-grpc.llm:9000" in notes
    assert "everybody who reaches the pods" not in notes


def test_certificates_make_the_network_policy_optional(helm: Renderer) -> None:
    objects = helm.objects(merged(BIG, {"networkPolicy": {"enabled": False}}))
    assert [name for kind, name in objects if kind == "NetworkPolicy"] == []
