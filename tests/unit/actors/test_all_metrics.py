"""Metrics of all replicas in one text, even if some do not answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from specray.actors.telemetry import GATHER_TIMEOUT_S, STALE_S, AllMetrics


class Broadcast:
    """A Serve handle and the result of its broadcast."""

    def __init__(self, results: Sequence[object] | Exception) -> None:
        self._results = results

    def broadcast(self, method: str, node_id: str) -> Broadcast:
        assert (method, node_id) == ("metrics_text", "")
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[object]:
        assert timeout_s == GATHER_TIMEOUT_S and return_exceptions
        if isinstance(self._results, Exception):
            raise self._results
        return list(self._results)


def there(*names: str) -> Callable[[], Awaitable[list[tuple[str, str]]]]:
    async def deployments() -> list[tuple[str, str]]:
        return [("app", name) for name in names]

    return deployments


def family(deployment: str, replica: str, value: int) -> str:
    labels = f'deployment="{deployment}",replica="{replica}"'
    return f"# HELP a A.\n# TYPE a gauge\na{{{labels}}} {value}.0\n"


@pytest.mark.parametrize(
    ("results", "values"),
    [
        ({"Ingress": [family("Ingress", "i", 1)], "Router": [family("Router", "r", 2)]}, [1, 2]),
        ({"Ingress": [family("Ingress", "i", 1), RuntimeError("died")], "Router": []}, [1]),
        ({"Ingress": [family("Ingress", "i", 1)], "Router": TimeoutError()}, [1]),
        ({"Ingress": [family("Ingress", "i", 1)], "Router": "unavailable"}, [1]),
    ],
    ids=["all", "one fails", "one is silent", "one deployment has no replicas"],
)
async def test_who_answers_is_shown(
    monkeypatch: pytest.MonkeyPatch, results: dict[str, Any], values: list[int]
) -> None:
    def handle(name: str, *, app_name: str) -> Broadcast:
        assert app_name == "app"
        found = results[name]
        if found == "unavailable":
            found = DeploymentUnavailableError(DeploymentID(name=name))
        return Broadcast(found)

    monkeypatch.setattr(serve, "get_deployment_handle", handle)
    text = await AllMetrics(there("Ingress", "Router")).text()
    lines = text.splitlines()
    assert lines[:2] == ["# HELP a A.", "# TYPE a gauge"]
    assert [float(line.rsplit(" ", 1)[1]) for line in lines[2:]] == values


async def test_a_deployment_that_is_silent_is_as_it_was_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Sequence[object] | Exception] = [
        [family("Router", "r", 2), family("Router", "s", 3)],
        TimeoutError(),
        TimeoutError(),
        [family("Router", "s", 4)],
        TimeoutError(),
        DeploymentUnavailableError(DeploymentID(name="Router")),
    ]
    times = iter([100.0, 100.0 + STALE_S, 100.0 + STALE_S + 0.1, 200.0, 201.0])

    class Handle:
        def broadcast(self, method: str, node_id: str) -> Broadcast:
            return Broadcast(answers.pop(0))

    monkeypatch.setattr(serve, "get_deployment_handle", lambda name, *, app_name: Handle())
    metrics = AllMetrics(there("Router"), monotonic=lambda: next(times))
    values = []
    while answers:
        lines = (await metrics.text()).splitlines()
        values.append([float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")])
    assert values == [[2, 3], [2, 3], [], [4], [4], []]
