"""Engines on the CPU let router and ingress go first."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from specray.actors.workers import ENGINE_NICENESS, let_callers_go_first
from specray.config import EngineConfig


def niceness_after(*configs: EngineConfig) -> int:
    for config in configs:
        let_callers_go_first(config)
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_only_threads_of_an_engine_are_nicer_and_only_once() -> None:
    config = EngineConfig.model_validate({"device": "cpu"})
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with ThreadPoolExecutor(1) as thread:
        after = thread.submit(niceness_after, config, config).result()
    assert after == max(before, ENGINE_NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
