"""Tests that are coroutines run in virtual time, as the router's."""

from tests.unit.router.conftest import clock as clock
from tests.unit.router.conftest import pytest_pyfunc_call as pytest_pyfunc_call
