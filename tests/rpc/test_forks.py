"""Forked children of a process that uses gRPC, as Ray forks to start its programs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.rpc import forking_process

from grpc._cython import cygrpc  # isort: skip

pytestmark = pytest.mark.slow


def test_every_child_of_a_process_that_uses_grpc_reaches_its_program() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run(
        [sys.executable, forking_process.__file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (done.stdout.strip(), done.returncode) == ("[0]", 0), done.stderr[-2000:]


def test_what_the_tests_start_reaches_its_program() -> None:
    """Regardless of import order: ``conftest.py`` uses gRPC before all tests."""
    assert not cygrpc.is_fork_support_enabled()
    # A fork of this process is dear: it has everything imported.
    assert forking_process.exit_codes(10) == [0]


def test_who_wants_the_handlers_keeps_them() -> None:
    script = "import specray, os; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    environment = os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == "1"
