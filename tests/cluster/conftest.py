"""Helm in one child process for each module that renders the chart."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.cluster.chart_harness import Renderer


@pytest.fixture(scope="module")
def helm() -> Iterator[Renderer]:
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("helm-python-sdk is not installed")
    with Renderer() as renderer:
        yield renderer
