"""Tests of a soak of several models on fakes: cases, faults and configuration, and when all are whole."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from specray.bench.soak.cases import make_cases
from specray.bench.soak.memory import MemoryRecord
from specray.bench.soak.models import churn_model, with_models
from specray.bench.soak.plan import SoakPlan
from specray.bench.soak.schedule import FaultKind, possible_faults
from specray.bench.soak.watch import Watch, Whole
from specray.bench.testbed.kinds import BedKind
from specray.bench.testbed.parts import Part, PartRole
from specray.checkpoint_digest import file_digest
from specray.config import parse_config
from specray.errors import ConfigError, EngineLostError
from specray.fakes import VirtualClock


def test_each_model_has_long_and_short_cases_that_name_it_over_http_and_grpc() -> None:
    cases = make_cases(8, seed=0, models=("a", "b"))
    assert [(case.model, case.is_long) for case in cases] == [
        (name, is_long) for name in "abab" for is_long in (True, False)
    ]
    assert [case.body("m")["model"] for case in cases[1:3]] == ["a", "b"]
    assert [case.params().model for case in cases[1:3]] == ["a", "b"]
    assert make_cases(1, seed=0)[0].body("m")["model"] == "m"


def test_several_models_have_their_own_faults_on_one_node_alone() -> None:
    one, two = (set(possible_faults(BedKind.PROCESSES, num_models=number)) for number in (1, 2))
    assert two - one == {FaultKind.MODELS_KILL, FaultKind.MODEL_CHURN}
    assert one - two == {FaultKind.ADAPTER_CHURN}
    assert set(SoakPlan(num_models=2).kinds) == two
    with pytest.raises(ConfigError, match="--num-models is 2; allowed on the test bed cluster: 1"):
        SoakPlan(num_models=2, testbed=BedKind.CLUSTER)
    with pytest.raises(ConfigError, match="--faults has 'model-churn'"):
        SoakPlan(faults="model-churn")


def test_models_of_a_soak_differ_in_their_weights_alone(tmp_path: Path) -> None:
    config = with_models(parse_config({"router": {"max_queued_tokens": 7}}), tmp_path, 3)
    assert [each.name for each in config.models] == ["soak-1", "soak-2", "soak-3"]
    alone = [config.of_model(each.name) for each in config.models]
    digests = {file_digest(Path(each.target.model) / "model.safetensors") for each in alone}
    assert len(digests) == 3
    assert {each.router.max_queued_tokens for each in alone} == {7}
    assert all(each.draft == parse_config({}).draft for each in alone)


async def test_a_model_is_unloaded_and_loaded_and_a_refusal_is_told() -> None:
    class Http:
        calls: list[str] = []  # noqa: RUF012

        async def post(self, path: str, body: dict[str, str]) -> dict[str, Any]:
            self.calls.append(f"{path} {body['model']}")
            if len(self.calls) > 3:
                raise EngineLostError("too busy")
            return {"load_s": 2.5}

    http: Any = Http()
    assert await churn_model(http, "a") == "a was unloaded, and loaded in 2.5 s"
    assert http.calls == ["/v1/models/unload a", "/v1/models/load a"]
    with pytest.raises(EngineLostError, match="a could not be unloaded and loaded: too busy"):
        await churn_model(http, "a")


class Bed:
    """All processes of two models; the draft of the second is back at 10 s."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.control = self

    async def parts(self) -> tuple[Part, ...]:
        roles = [PartRole.CONTROLLER, PartRole.INGRESS, PartRole.MODELS]
        roles += 2 * [PartRole.ROUTER, PartRole.TARGET, PartRole.DRAFT]
        return tuple(Part(role, str(pid), pid, "n") for pid, role in enumerate(roles, 1))

    async def running(self) -> dict[str, int]:
        return {"Router": 2, "Draft": 2 if self.clock.monotonic() >= 10 else 1}

    async def metrics_text(self) -> str:
        now = self.clock.monotonic()
        name = "specray_spec_decode_num_drafts_by_source_total"
        # The second model drafts again at 15 s.
        counts = {"specray-a": 1 + now, "specray-b": 1 + max(0.0, now - 15)}
        lines = [f'{name}{{application="{app}",source="model"}} {count}' for app, count in counts.items()]
        return "\n".join([*lines, f'{name}{{application="specray-b",source="ngram"}} {now}', ""])


def test_the_service_is_whole_when_each_model_has_its_parts_and_drafts_again() -> None:
    clock = VirtualClock()
    bed: Any = Bed(clock)
    watch = Watch(bed, bed, MemoryRecord(warmup_s=1, min_span_s=1), now_s=clock.monotonic)

    async def main() -> Whole | None:
        reading = asyncio.create_task(watch.metrics_for_ever())
        whole = await watch.wait_whole(killed=frozenset(), timeout_s=60, ranks=1, drafts=1, num_models=2)
        reading.cancel()
        return whole

    start_s = clock.monotonic()
    whole = clock.run(main())
    assert whole is not None
    assert whole.parts_s - start_s == pytest.approx(10.0, abs=1.0)
    assert whole.speculation_s - start_s == pytest.approx(15.5, abs=1.0)
