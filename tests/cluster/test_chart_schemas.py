"""Tests of the rendered chart against Kubernetes' own schemas, with unknown fields refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.chart_harness import CHART, EXAMPLES, IMAGE, Renderer, load, merged

kubernetes_validate = pytest.importorskip("kubernetes_validate")

VERSIONS = ("1.28.0", "1.37.0")
"""Kubernetes versions: the oldest that Chart.yaml allows, and the newest known."""
BIG = load(CHART / "examples" / "one-small-eight-big.yaml")
OTHERS = {"RayService", "PodMonitor"}
"""Kinds that are not Kubernetes' own; KubeRay's is checked against its CRD in test_chart.py, its pods
here."""
VALUES = {
    **{path.stem: load(path) for path in EXAMPLES},
    "every part": merged(
        merged(BIG, IMAGE),
        {
            "gcsFaultTolerance": {"usernameKey": "user"},
            "secretMounts": [{"name": "specray-tls", "path": "/etc/tls"}],
            "config": {"grpc": {"port": 9000}},
        },
    ),
}

each = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
each_version = pytest.mark.parametrize("version", VERSIONS)


def pods(service: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the pods of a RayService as if somebody asked for them."""
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield {"apiVersion": "v1", "kind": "Pod", **group["template"]}


@each
@each_version
def test_every_manifest_is_one_of_kubernetes(helm: Renderer, values: dict[str, Any], version: str) -> None:
    manifests = list(helm.objects(merged(IMAGE, values)).values())
    (service,) = [manifest for manifest in manifests if manifest["kind"] == "RayService"]
    checked = [manifest for manifest in manifests if manifest["kind"] not in OTHERS]
    kinds = {manifest["kind"] for manifest in checked}
    assert kinds >= {"ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "ServiceAccount"}
    for manifest in (*checked, *pods(service)):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_every_template_is_rendered_by_some_values(helm: Renderer) -> None:
    rendered = {name for values in VALUES.values() for name in helm.files(merged(IMAGE, values))}
    folder = CHART / "templates"
    written = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    assert rendered == {name for name in written if not name.startswith("_")}


@each_version
def test_a_misspelt_field_is_seen(helm: Renderer, version: str) -> None:
    objects = helm.objects(merged(IMAGE, BIG))
    (policy,) = [manifest for (kind, _), manifest in objects.items() if kind == "NetworkPolicy"]
    policy["spec"]["podSelectors"] = policy["spec"].pop("podSelector")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(policy, version, strict=True)
    (pod, *_) = pods(objects["RayService", "demo-specray"])
    pod["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, version, strict=True)
