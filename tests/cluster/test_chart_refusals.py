"""Tests of the chart's checks: it refuses what is unknown or cannot work, and its schema fits the
configuration."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.chart_harness import CHART, DEFAULTS, IMAGE, KEY, ROOT, Renderer, RenderError, merged


def test_an_image_must_be_named(helm: Renderer) -> None:
    with pytest.raises(RenderError, match=r"image\.repository: build cluster/Dockerfile"):
        helm.files({})


@pytest.mark.parametrize(
    ("values", "where", "key"),
    [
        ({"replicas": 2}, "", "replicas"),
        ({"image": {"name": "x"}}, "/image", "name"),
        ({"config": {"draughts": []}}, "/config", "draughts"),
        ({"config": {"target": {"modle": "x"}}}, "/config/target", "modle"),
        (
            {"config": {"target": {"ray_actor_options": {"max_restarts": 1}}}},
            "/config/target/ray_actor_options",
            "max_restarts",
        ),
        ({"models": {"s3": "x"}}, "/models", "s3"),
        ({"gcsFaultTolerance": {"redisPassword": "secret"}}, "/gcsFaultTolerance", "redisPassword"),
        (
            {"workerGroups": [{"name": "a", "replicas": 1, "resources": {}, "gpus": 1}]},
            "/workerGroups/0",
            "gpus",
        ),
    ],
)
def test_an_unknown_value_is_refused_by_its_name(
    helm: Renderer, values: dict[str, Any], where: str, key: str
) -> None:
    with pytest.raises(RenderError) as refusal:
        helm.files(merged(IMAGE, values))
    assert f"- at '{where}': additional properties '{key}' not allowed" in str(refusal.value)


def test_every_object_of_the_schema_is_closed_or_a_map_of_typed_values() -> None:
    def objects(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(schema, dict):
            if schema.get("type") == "object":
                yield path, schema
            for key, value in schema.items():
                yield from objects(value, f"{path}/{key}")
        elif isinstance(schema, list):
            for index, value in enumerate(schema):
                yield from objects(value, f"{path}/{index}")

    found = list(objects(json.loads((CHART / "values.schema.json").read_text()), ""))
    assert len(found) > 40
    for path, schema in found:
        if "properties" in schema or "patternProperties" in schema:
            assert schema["additionalProperties"] is False, path
        else:
            assert isinstance(schema["additionalProperties"], dict), path


def test_the_schema_of_config_is_that_of_the_configuration() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    generate = runpy.run_path(str(ROOT / "helm" / "generate_schema.py"))
    assert schema == generate["with_config"](schema), "run: make schema"


def test_every_value_has_a_default_that_shows_it() -> None:
    def keys(schema: dict[str, Any], path: str) -> set[str]:
        definition = schema.get("properties", {})
        return {path} | set().union(*(keys(value, f"{path}.{key}") for key, value in definition.items()))

    def shown(values: Any, path: str) -> set[str]:
        parts = values.items() if isinstance(values, dict) else ()
        return {path} | set().union(*(shown(value, f"{path}.{key}") for key, value in parts))

    schema = json.loads((CHART / "values.schema.json").read_text())
    del schema["properties"]["config"]
    assert keys(schema, "") - shown(DEFAULTS, "") == set()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"gracePeriods": {"drainSeconds": 80}},
            "gracePeriods.terminationSeconds is 90; allowed: drainSeconds + 15 = 95 or more",
        ),
        ({"config": {"rpc": {"listen": "loopback"}}}, "config.rpc.listen is loopback; allowed: node"),
        (
            {"networkPolicy": {"enabled": False}},
            "networkPolicy.enabled is false, and config.rpc has neither tls nor secret_file",
        ),
        (
            {"networkPolicy": {"operator": {"namespaceSelector": None}}},
            "networkPolicy.operator.namespaceSelector selects all namespaces",
        ),
        (
            {"networkPolicy": {"operator": {"namespaceSelector": {"matchLabels": None}}}},
            "networkPolicy.operator.namespaceSelector selects all namespaces",
        ),
        ({"config": {"http": {"server": "ingress"}}}, "config.http.server is ingress; allowed: proxy, auto"),
        *(
            ({"config": {part: {"host": host}}}, f"config.{part}.host is {host}; allowed: an address that")
            for part in ("http", "grpc")
            for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]")
        ),
        ({"config": {"grpc": {"port": 8000}}}, "config.grpc.port: 8000 is config.http.port as well"),
        (
            {
                "models": {
                    "existingClaim": "models",
                    "download": [{"name": "a", "repository": "a/b", "revision": "c"}],
                }
            },
            "models: existingClaim and download exclude each other",
        ),
        (
            {"models": {"download": [{"name": "a", "repository": "a/b", "revision": "c", "groups": ["x"]}]}},
            "models.download: there is no worker group x",
        ),
        (
            {"config": {"target": {"ray_actor_options": {"label_selector": {"specray.io/group": "x"}}}}},
            "config.target.ray_actor_options.label_selector: there is no worker group x",
        ),
        *(
            (
                {
                    "config": {
                        "draft": {"ray_actor_options": {"label_selector": {"specray.io/group": wanted}}}
                    }
                },
                f"config.draft.ray_actor_options.label_selector: there is no worker group {wanted}",
            )
            for wanted in ("!workers", "in(x, y)", "!in(x,workers)", "in()", "in(workers")
        ),
        (
            {
                "workerGroups": [{"name": "a", "replicas": 1, "resources": {}}] * 2,
                "config": {"ingress": {"ray_actor_options": {"label_selector": {"specray.io/group": "a"}}}},
            },
            "workerGroups: two groups have the same name",
        ),
        (
            {"workerGroups": [{"name": "a", "replicas": 1, "maxReplicas": 0, "resources": {}}]},
            "workerGroups a: minReplicas 1, replicas 1, maxReplicas 0 must not fall",
        ),
        (
            {"workerGroups": [{"name": "a", "replicas": 2, "resources": {}}]},
            "workerGroups a: of 2 pods those without an Ingress would refuse gRPC",
        ),
        (
            {"workerGroups": [{"name": name, "replicas": 1, "resources": {}} for name in "ab"]},
            "must say in which one specray.io/group the Ingress is",
        ),
        (
            {
                "workerGroups": [{"name": name, "replicas": 1, "resources": {}} for name in "ab"],
                "config": {
                    "ingress": {"ray_actor_options": {"label_selector": {"specray.io/group": "in(a,b)"}}}
                },
            },
            "must say in which one specray.io/group the Ingress is",
        ),
        (
            {"podMonitors": {"enabled": True}, "config": {"auth": {"keys": [KEY]}}},
            "podMonitors.keySecret: config.auth.keys close /metrics",
        ),
        ({"gcsFaultTolerance": {"enabled": True}}, "gcsFaultTolerance.redisAddress: host:port of the Redis"),
        (
            {"gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379"}},
            "gcsFaultTolerance.existingSecret: the Secret with its password",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(
    helm: Renderer, values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RenderError, match=re.escape(reason)):
        helm.files(merged(IMAGE, values))
