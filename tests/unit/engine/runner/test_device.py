"""Engines on chosen CPU cores."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

from specray.engine.device import hardware_of, num_usable_cores, use_cores
from specray.errors import ConfigError
from specray.fakes.engines import fake_info

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin threads")


def on_a_thread(work: object) -> list[object]:
    seen: list[object] = []

    def run() -> None:
        assert callable(work)
        seen.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10.0)
    return seen


def test_a_thread_and_its_children_stay_on_the_cores_that_it_was_given() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)

    def pin() -> tuple[set[int], int, list[object]]:
        use_cores((core,))
        return os.sched_getaffinity(0), num_usable_cores(), on_a_thread(lambda: os.sched_getaffinity(0))

    assert on_a_thread(pin) == [({core}, 1, [{core}])]
    assert os.sched_getaffinity(0) == before


def test_engines_share_the_cores_that_both_are_given() -> None:
    def names_on(cores: tuple[int, ...] | None) -> tuple[str, ...]:
        use_cores(cores)
        return hardware_of(torch.device("cpu"))

    first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    (of_all,), (of_first,), (of_last,) = (
        on_a_thread(partial(names_on, cores)) for cores in (None, (first,), (last,))
    )
    infos = [replace(fake_info("draft"), hardware=names) for names in (of_all, of_first, of_last, ())]
    assert infos[0].shares_with(infos[1]) and infos[0].shares_with(infos[2])
    assert infos[1].shares_with(infos[2]) is (first == last)
    # Nothing is known of the last.
    assert not infos[0].shares_with(infos[3])


def test_no_cores_leave_the_thread_alone() -> None:
    before = os.sched_getaffinity(0)
    use_cores(None)
    assert os.sched_getaffinity(0) == before


def test_a_core_that_is_not_there_is_named_with_those_that_are() -> None:
    usable = sorted(os.sched_getaffinity(0))
    with pytest.raises(ConfigError) as caught:
        use_cores((9999,))
    assert str(caught.value) == f"cores is (9999,); allowed here: {usable}"
