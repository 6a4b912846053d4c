"""Tests of the environment of processes with engines: set in time, and never over what the user has set."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from specray.actors.drafts.deployment import DraftReplica
from specray.actors.targets.ranks import DraftRank, TargetRank
from specray.config import parse_config

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
THREADS = {"GOMP_SPINCOUNT": "10000"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The process's environment, with none of the variables."""
    values = {name: value for name, value in os.environ.items() if name not in NAMES}
    monkeypatch.setattr(os, "environ", values)
    monkeypatch.setattr(sys, "platform", "linux")
    # The logs of this process are other tests'.
    monkeypatch.setattr("specray.actors.targets.ranks.configure_logging", lambda *_, **__: None)
    return values


def values_of(**draft: Any) -> dict[str, Any]:
    return parse_config({"draft": draft}).model_dump(mode="json")


def found(environment: dict[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in NAMES if name in environment}


@pytest.mark.parametrize("rank_class", [TargetRank, DraftRank])
def test_a_rank_has_it_before_it_starts(environment: dict[str, str], rank_class: Any) -> None:
    rank_class(values_of(), 0)
    assert found(environment) == THREADS | LOOPBACK


@pytest.mark.parametrize(("size", "interfaces"), [(1, {}), (2, LOOPBACK)])
def test_a_draft_has_it_before_it_loads(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, size: int, interfaces: dict[str, str]
) -> None:
    for name in ("keep_serve_on_loopback", "begin_logs"):
        monkeypatch.setattr(f"specray.actors.drafts.deployment.{name}", lambda *_: None)
    monkeypatch.delattr(DraftReplica, "__del__")  # Serve awaits it.
    DraftReplica(values_of(tensor_parallel_size=size))
    assert found(environment) == THREADS | interfaces


@pytest.mark.parametrize("given", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "passive"}])
def test_what_the_user_has_set_stays(environment: dict[str, str], given: dict[str, str]) -> None:
    environment.update(given)
    TargetRank(values_of(), 0)
    assert found(environment) == given | LOOPBACK


@pytest.mark.slow
def test_torch_is_loaded_after_it() -> None:
    """Threads read it when torch is loaded."""
    modules = "specray.actors.drafts.deployment, specray.actors.targets.ranks"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "False\n"
