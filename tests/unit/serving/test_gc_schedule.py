"""Tests of the collector: full collections wait for calm, but not for ever."""

from __future__ import annotations

import asyncio
import gc

import pytest

from specray.serving.gc_schedule import CALM_INTERVAL_S, LONGEST_S, NUM_CALM, THRESHOLDS, Collector


class Process:
    """A process's clock, requests and collections, as a test sets them."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.num_under_way = 0
        self.num_collections = 0

    def collect(self) -> None:
        self.num_collections += 1

    def collector(self) -> Collector:
        return Collector(lambda: self.num_under_way, collect=self.collect, monotonic=lambda: self.now_s)


def test_calm_process_is_collected_now_and_then() -> None:
    process = Process()
    collector = process.collector()
    process.num_under_way = NUM_CALM
    process.now_s += CALM_INTERVAL_S - 1
    collector.look()
    assert process.num_collections == 0
    process.now_s += 1
    collector.look()
    collector.look()
    assert process.num_collections == 1
    process.now_s += CALM_INTERVAL_S
    collector.look()
    assert process.num_collections == 2


def test_busy_process_is_collected_only_after_a_long_time() -> None:
    process = Process()
    collector = process.collector()
    process.num_under_way = NUM_CALM + 1
    process.now_s += LONGEST_S - 1
    collector.look()
    assert process.num_collections == 0
    process.now_s += 1
    collector.look()
    collector.look()
    assert process.num_collections == 1


async def test_python_leaves_old_objects_alone_for_as_long_as_it_runs() -> None:
    before, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    process = Process()
    task = asyncio.create_task(process.collector().run())
    try:
        await asyncio.sleep(0)
        assert (gc.get_threshold(), process.num_collections) == (THRESHOLDS, 1)
        assert gc.get_freeze_count() > num_frozen
        old: list[object] = []
        old.append(old)
        gc.collect(1)
        # It lies with the old ones now; a hundred thousand objects later it has not been looked at.
        before_collections = gc.get_stats()[2]["collections"]
        _ = [[index] for index in range(100_000)]
        assert gc.get_stats()[2]["collections"] == before_collections
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert gc.get_threshold() == before
