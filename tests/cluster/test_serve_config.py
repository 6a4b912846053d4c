"""Tests of the shipped Serve configuration files: Serve and specray accept every key."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from specray.errors import ConfigError
from specray.serving.app import build_app

FILES = sorted((Path(__file__).resolve().parents[2] / "cluster").glob("serve*.yaml"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(request.param.read_text(encoding="utf-8"))
    return loaded


def test_there_is_a_file_for_one_machine_and_one_for_several() -> None:
    assert [path.name for path in FILES] == ["serve-nodes.yaml", "serve.yaml"]


def test_serve_accepts_the_file_and_knows_every_key(values: dict[str, Any]) -> None:
    ServeDeploySchema.model_validate(values)
    # Serve ignores unknown keys, so a misspelt one would not be seen.
    assert set(values) <= set(ServeDeploySchema.model_fields)
    for application in values["applications"]:
        assert set(application) <= set(ServeApplicationSchema.model_fields)


def test_its_builder_binds_an_application(values: dict[str, Any]) -> None:
    (application,) = values["applications"]
    module, _, name = application["import_path"].partition(":")
    builder = getattr(importlib.import_module(module), name)
    # As Serve calls it, which counts its parameters first.
    built = call_user_app_builder_with_args_if_necessary(builder, application["args"])
    assert isinstance(built, Application)


def test_builder_refuses_an_unknown_key(values: dict[str, Any]) -> None:
    (application,) = values["applications"]
    with pytest.raises(ConfigError, match=r"target\.modle: Extra inputs are not permitted"):
        build_app({**application["args"], "target": {"modle": "embedded"}})
