"""What the chart tells Serve: the configuration of every deployment, and Serve's own options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from specray.config import parse_config
from specray.serving.app import build_app
from tests.cluster.chart_harness import (
    DEFAULTS,
    RAY_SERVICE,
    Renderer,
    RenderError,
    each_example,
    load,
    merged,
    ray_service,
)


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
