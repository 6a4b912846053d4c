"""What the chart tells Serve: the configuration of every deployment, and Serve's own options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from specray.config import parse_config
from specray.config.live import LIVE_KEYS, with_live
from specray.serving.app import build_app
from tests.cluster.chart_harness import (
    CHART,
    DEFAULTS,
    KEY,
    RAY_SERVICE,
    Renderer,
    RenderError,
    each_example,
    load,
    merged,
    ray_service,
)


def in_force(application: dict[str, Any], deployment: str = "Ingress") -> dict[str, Any]:
    """Returns the configuration as a deployment has it once Serve has brought its user_config."""
    values: dict[str, Any] = {**application["args"]}
    (given,) = [part["user_config"] for part in application["deployments"] if part["name"] == deployment]
    for section, changed in given.items():
        values[section] = values.get(section, {}) | changed
    return values


@each_example
def test_serve_gets_the_configuration_of_specray_serve(helm: Renderer, path: Path) -> None:
    values = merged(DEFAULTS["config"], load(path)["config"])
    objects = helm.objects(load(path))
    text = objects[RAY_SERVICE]["spec"]["serveConfigV2"]
    serve = yaml.safe_load(text)
    (application,) = serve["applications"]
    config = in_force(application)
    if any(part["name"] == "Draft" for part in application["deployments"]):
        draft = in_force(application, "Draft")
        config |= {"draft": draft["draft"]}
        assert draft["logging"] == values["logging"]
    assert config == {name: part for name, part in values.items() if part != {}}
    assert parse_config(config) == parse_config(values)
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
    config = parse_config(in_force(serve["applications"][0]))
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
    *others, draft = other["deployments"]
    assert others == one["deployments"][:-1]
    assert draft["name"] == "Draft" and draft["user_config"]["draft"] == {"model": "/models/other"}


@pytest.mark.parametrize(
    "draft",
    [{"model": "ngram"}, {"model": "/m", "enabled": False}, {"model": "/m", "num_replicas": 0}],
)
def test_without_a_draft_deployment_nothing_is_said_of_it(helm: Renderer, draft: dict[str, Any]) -> None:
    serve = yaml.safe_load(ray_service(helm, {"config": {"draft": draft}})["serveConfigV2"])
    (application,) = serve["applications"]
    assert [part["name"] for part in application["deployments"]] == ["Ingress", "Router"]
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
    (application,) = serve["applications"]
    for deployment in ("Ingress", "Router"):
        assert parse_config(in_force(application, deployment)).router.max_queued_tokens == 1_000_000


def test_what_changes_while_serving_changes_no_args(helm: Renderer) -> None:
    changed: dict[str, Any] = {
        "speculation": {"num_speculative_tokens": 2, "max_num_draft_probs": 32},
        "router": {"max_queued_requests": 7},
        "auth": {"keys": [KEY, {**KEY, "name": "other", "sha256": "1" * 64}]},
        "http": {"max_body_bytes": 2048},
        "logging": {"level": "DEBUG"},
    }
    one, other = (
        yaml.safe_load(ray_service(helm, {"config": config})["serveConfigV2"])["applications"][0]
        for config in ({"speculation": {"max_num_draft_probs": 32}}, changed)
    )
    assert one["args"] == other["args"]
    assert other["args"]["speculation"] == {"max_num_draft_probs": 32}
    ingress, router, draft = (part["user_config"] for part in other["deployments"])
    assert ingress["auth"] == changed["auth"] and ingress["logging"]["level"] == "DEBUG"
    # Hashes of keys are nobody's business who does not check them.
    assert router == {name: part for name, part in ingress.items() if name != "auth"}
    assert router["speculation"] == {"num_speculative_tokens": 2}
    assert draft == {"draft": {}, "logging": ingress["logging"]}
    for values in (ingress, router, {"logging": draft["logging"]}):
        with_live(parse_config(other["args"]), values)


def test_the_chart_knows_the_keys_that_change_while_serving() -> None:
    text = (CHART / "templates" / "_helpers.tpl").read_text(encoding="utf-8")
    body = text.partition('define "specray.liveKeys" -}}')[2].partition("{{- end")[0]
    assert {section: tuple(names) for section, names in yaml.safe_load(body).items()} == dict(LIVE_KEYS)


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
