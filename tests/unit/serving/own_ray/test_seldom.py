"""Tests of how often Serve's controller asks for the nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from specray.environment import OWN_RAY_ENVIRONMENT
from specray.serving.own_ray.seldom import PERIOD_S, at_most_every


def test_each_object_asks_at_once_and_then_once_in_a_period_unless_it_failed() -> None:
    now_s, asked = 10.0, []
    error: Exception | None = None

    def ask(cache: Any) -> None:
        asked.append((cache.name, now_s))
        if error is not None:
            raise error

    method = at_most_every(1.0, ask, monotonic=lambda: now_s)
    first, second = SimpleNamespace(name="first"), SimpleNamespace(name="second")
    for seconds in (0.0, 0.25, 0.5, 0.25):
        now_s += seconds
        method(first)
    method(second)
    error = OSError("no GCS")
    now_s += 1.0
    for _ in range(2):
        with pytest.raises(OSError, match="no GCS"):
            method(first)
    assert asked == [("first", 10.0), ("first", 11.0), ("second", 11.0), ("first", 12.0), ("first", 12.0)]


def test_the_controller_of_our_own_ray_asks_by_the_name_in_its_environment() -> None:
    check = (
        "import os\n"
        "from types import SimpleNamespace\n"
        "from ray.serve._private.cluster_node_info_cache import ClusterNodeInfoCache\n"
        "from ray.serve._private.constants import RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH as path\n"
        "from ray.serve._private.utils import call_function_from_import_path\n"
        "before = ClusterNodeInfoCache.update\n"
        "call_function_from_import_path(path)\n"
        "assert ClusterNodeInfoCache.update.__wrapped__ is before\n"
    )
    subprocess.run(
        [sys.executable, "-c", check], env={**os.environ, **OWN_RAY_ENVIRONMENT}, check=True, timeout=100
    )
    assert PERIOD_S == 5.0
