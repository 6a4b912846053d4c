"""Tests that are coroutines run in virtual time, on the event loop of their ``clock``."""

from __future__ import annotations

import inspect

import pytest

from specray.fakes import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test = inspect.unwrap(pyfuncitem.obj)
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    given.get("clock", VirtualClock()).run(test(**given))
    return True
