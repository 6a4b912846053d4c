"""Tests of the image and of the nodes of ``ray up``: they fit what they run."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from specray.config import parse_config

CLUSTER = Path(__file__).resolve().parents[2] / "cluster"


@pytest.fixture
def nodes() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CLUSTER / "ray-up.yaml").read_text(encoding="utf-8"))
    return loaded


def test_ray_up_accepts_the_file(nodes: dict[str, Any]) -> None:
    validate_config(prepare_config(nodes))


def test_its_nodes_hold_what_the_serve_file_asks_for(nodes: dict[str, Any]) -> None:
    serve = yaml.safe_load((CLUSTER / "serve-nodes.yaml").read_text(encoding="utf-8"))
    config = parse_config(serve["applications"][0]["args"])
    small, big = (nodes["available_node_types"][name] for name in ("small", "big"))
    draft, rank = config.draft.ray_actor_options, config.target.ray_actor_options
    assert draft["label_selector"] == small["labels"]
    assert [small["resources"][key] >= draft[f"num_{key.lower()}s"] for key in ("CPU", "GPU")] == [True, True]
    assert rank["label_selector"] == big["labels"], "no rank may take the draft's GPU"
    num_ranks = config.target.tensor_parallel_size
    assert big["resources"]["GPU"] == num_ranks * rank["num_gpus"]
    assert big["resources"]["CPU"] >= num_ranks * rank["num_cpus"]


def test_workers_of_several_nodes_listen_beyond_their_machine() -> None:
    serve = yaml.safe_load((CLUSTER / "serve-nodes.yaml").read_text(encoding="utf-8"))
    assert parse_config(serve["applications"][0]["args"]).rpc.listen == "node"


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    # In a virtual environment it lies beside the interpreter.
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    run = subprocess.run(
        [hadolint, str(CLUSTER / "Dockerfile")], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_the_image_has_what_the_chart_and_kuberay_call_and_is_not_root() -> None:
    lines = (CLUSTER / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000"]
    installed = next(line for line in lines if "apt-get install" in line)
    assert "wget" in installed.split()


def test_the_image_has_what_every_configuration_may_ask_for() -> None:
    project = tomllib.loads((CLUSTER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = sorted(set(project["optional-dependencies"]) - {"dev"})
    assert extras == ["otlp"]
    assert "python .ci/requirements.py otlp >requirements.txt" in (CLUSTER / "Dockerfile").read_text("utf-8")
