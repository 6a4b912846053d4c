"""What a new owner of models makes of the applications that it finds, and what it is told to keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve.schema import ApplicationStatus

from specray.actors.models import applications
from specray.actors.models.applications import ServeApplications, app_of, app_of_pool
from specray.config import parse_config
from specray.loading.table import ModelState

VALUES: dict[str, Any] = {"models": [{"name": name} for name in ("a", "b", "c", "d", "e")]}


class Cluster:
    """Serve's applications, and Ray's store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.apps: dict[str, ApplicationStatus] = {}
        self.stored: dict[str, Any] = {}
        monkeypatch.setattr(serve, "status", self._status)
        monkeypatch.setattr(serve, "delete", self.apps.pop)
        monkeypatch.setattr(serve, "run_many", self._run)
        monkeypatch.setattr(applications, "read_stored", self.stored.get)
        monkeypatch.setattr(applications, "write_stored", self.stored.__setitem__)

    def _status(self) -> SimpleNamespace:
        return SimpleNamespace(
            applications={name: SimpleNamespace(status=status) for name, status in self.apps.items()}
        )

    def _run(self, targets: list[serve.RunTarget], **_: bool) -> None:
        self.apps[targets[0].name] = ApplicationStatus.RUNNING


async def test_what_is_as_configured_is_taken_over_and_the_rest_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    before = ServeApplications(parse_config({"models": [*VALUES["models"], {"name": "gone"}]}), "key")
    for name in ("a", "b", "c", "d", "gone"):
        await before.load(name)
    cluster.apps |= {
        app_of("b"): ApplicationStatus.DEPLOYING,
        app_of("c"): ApplicationStatus.DEPLOY_FAILED,
        "another": ApplicationStatus.RUNNING,
    }
    changed = [*VALUES["models"][:3], {"name": "d", "target": {"max_num_seqs": 2}}, {"name": "e"}]
    found = await ServeApplications(parse_config({"models": changed}), "key").found()
    assert found == {
        "a": ModelState.LOADED,
        "b": ModelState.LOADING,
        "c": ModelState.DRAINING,
        "d": ModelState.DRAINING,
    }
    assert set(cluster.apps) == {*map(app_of, "abcd"), "another"}


async def test_what_a_call_unloaded_stays_so_until_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch)
    config = parse_config(VALUES)
    before = ServeApplications(config, "key")
    await before.note("a", is_wanted=False)
    await before.note("b", is_wanted=False)
    await before.note("a", is_wanted=True)
    assert await ServeApplications(config, "key").unwanted() == {"b"}
    assert await ServeApplications(config, "other").unwanted() == set()


async def test_what_a_model_took_is_remembered_for_this_configuration_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    before = ServeApplications(parse_config(VALUES), "key")
    await before.load("a")
    await before.note("b", is_wanted=False)
    for name, num_bytes in (("a", 7), ("b", 5), ("a", 8)):
        await before.remember(name, num_bytes)
    assert await before.remembered() == {"a": 8, "b": 5}
    changed = [{"name": "a"}, {"name": "b", "target": {"max_num_seqs": 2}}]
    after = ServeApplications(parse_config({"models": changed}), "key")
    assert await after.remembered() == {"a": 8}
    await after.remember("b", 6)
    (stored,) = cluster.stored.values()
    assert sorted(stored["bytes"].values()) == [6, 8]
    assert (stored["unwanted"], list(stored["digests"])) == (["b"], [app_of("a")])


async def test_a_shared_draft_comes_with_its_first_model_and_goes_with_its_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    monkeypatch.setattr(serve, "get_deployment_handle", lambda name, *, app_name: None)
    models = [{"name": name, "draft": {"pool": "p"}} for name in ("a", "b")]
    found = ServeApplications(parse_config({"models": models, "drafts": [{"name": "p"}]}), "key")
    await found.load("a")
    await found.load("b")
    assert set(cluster.apps) == {app_of_pool("p"), app_of("a"), app_of("b")}
    await found.unload("a")
    assert set(cluster.apps) == {app_of_pool("p"), app_of("b")}
    await found.unload("b")
    assert cluster.apps == {}


def test_no_model_has_the_application_of_a_pool() -> None:
    assert app_of("pool-p") != app_of_pool("p")
    assert app_of("Pool_p") != app_of_pool("p")


@pytest.mark.parametrize(
    ("answers", "num_bytes"),
    [
        ({"Router": [5, 6], "Draft": [2]}, 13),
        ({"Router": [5, RuntimeError("a rank is gone")], "Draft": [2]}, 0),
        ({"Router": [5], "Draft": []}, 0),
    ],
)
async def test_memory_is_that_of_all_replicas_or_not_known(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[object]], num_bytes: int
) -> None:
    Cluster(monkeypatch)
    monkeypatch.setattr(serve, "get_deployment_handle", lambda name, *, app_name: (app_name, name))

    async def ask_all(handle: tuple[str, str], method: str) -> list[object]:
        assert (handle[0], method) == (app_of("a"), "memory_bytes")
        return answers[handle[1]]

    monkeypatch.setattr(applications, "ask_all", ask_all)
    assert await ServeApplications(parse_config(VALUES), "key").measure("a") == num_bytes
