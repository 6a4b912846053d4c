"""The soak's adapters fit its target, and its churn sees what must not happen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specray.adapter_folders import adapter_folder
from specray.bench.soak.adapters import UNDER_LOAD, churn, with_adapters
from specray.bench.soak.cases import make_cases
from specray.checkpoint_digest import adapter_digest
from specray.config import Config
from specray.demo.paths import demo_target_path
from specray.engine.model.checkpoint.adapter import read_adapter
from specray.engine.model.description import ModelArgs, check_loadable
from specray.errors import EngineLostError, InvalidRequestError


def test_adapters_of_the_target_are_written_and_differ(tmp_path: Path) -> None:
    config = with_adapters(Config(), tmp_path)
    assert config.target.adapters is not None
    folders = [adapter_folder(config.target.adapters.directory, path.name) for path in tmp_path.iterdir()]
    assert len(folders) == 4 > config.target.adapters.max_loaded
    assert len({adapter_digest(folder) for folder in folders}) == 4
    for folder in folders:
        assert len(read_adapter(str(folder)).layers) >= 3
        check_loadable(ModelArgs(str(demo_target_path()), role="target", adapter=str(folder)))


def test_cases_have_every_adapter_and_none_whatever_their_length() -> None:
    cases = make_cases(24, seed=3, adapters=UNDER_LOAD)
    assert {(case.adapter, case.is_long) for case in cases} == {
        (name, is_long) for name in ("", *UNDER_LOAD) for is_long in (False, True)
    }
    assert {case.body("base")["model"] for case in cases} == {"base", *UNDER_LOAD}
    assert {case.adapter for case in make_cases(24, seed=3)} == {""}


class Service:
    """bench.load.client.ServerClient with adapters that it may get wrong."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.version = ""
        self.calls: list[str] = []

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.calls.append(f"{path.removeprefix('/v1/')} {body.get('lora_path', '')}".strip())
        if self.wrong == "refuses":
            raise InvalidRequestError("no")
        if self.wrong != "stale" or not self.version:
            self.version = body.get("lora_path", "")
        return {}

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        is_drafted = body["speculation"]["enabled"]
        return {"choices": [{"text": self.version + ("!" if is_drafted and self.wrong == "drafts" else "")}]}


async def test_churn_loads_swaps_and_unloads() -> None:
    service = Service()
    await churn(service)  # type: ignore[arg-type]
    assert service.calls == [
        "load_lora_adapter soak-first",
        "load_lora_adapter soak-second",
        "unload_lora_adapter",
    ]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("drafts", "the answer of soak-first differs with speculation"),
        ("stale", "both versions of an adapter answer alike"),
        ("refuses", "an adapter could not be used: no"),
    ],
)
async def test_churn_tells_what_is_wrong(wrong: str, problem: str) -> None:
    with pytest.raises(EngineLostError, match=problem):
        await churn(Service(wrong))  # type: ignore[arg-type]
