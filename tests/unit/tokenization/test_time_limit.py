"""Code that does not end is ended; code that does is left alone."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from specray.tokenization.templates.time_limit import run_limited


def test_what_ends_in_time_returns_its_value() -> None:
    assert run_limited(lambda: 7, 60.0) == 7


def test_what_does_not_end_is_ended_though_it_catches_everything_of_its_own() -> None:
    def endless() -> None:
        while True:
            try:
                sum(range(100))
            except Exception:
                continue

    with pytest.raises(TimeoutError, match=r"did not end within 0\.05 s"):
        run_limited(endless, 0.05)


def test_its_own_error_passes() -> None:
    with pytest.raises(ZeroDivisionError):
        run_limited(lambda: 1 // 0, 60.0)


def test_one_thread_is_ended_and_the_others_are_not() -> None:
    seen = []

    def work() -> None:
        seen.append(run_limited(lambda: sum(range(1000)), 60.0))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    with pytest.raises(TimeoutError):
        run_limited(lambda: [time.sleep(0.001) for _ in iter(int, 1)], 0.05)
    for thread in threads:
        thread.join(60)
    assert seen == [499_500] * 4


def test_an_end_that_comes_too_late_harms_nothing() -> None:
    values = set[int]()
    for _ in range(300):
        with contextlib.suppress(TimeoutError):
            values.add(run_limited(lambda: sum(range(2000)), 0.00005))
    assert values <= {1_999_000}
