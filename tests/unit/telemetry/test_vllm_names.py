"""Metrics under vLLM's names: the same values, vLLM's labels, and all that a router has."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from specray.config import parse_config
from specray.fakes import FakeRouterClient
from specray.telemetry.exposition import VLLM_NAMES, labelled, with_vllm_names
from specray.telemetry.metrics import RouterMetrics
from tests.unit.router.harness import fake_target
from tests.unit.serving.http.service import INFO, MODEL, serving


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def router_text() -> str:
    metrics = RouterMetrics()
    metrics.observe_round(4, 3)
    metrics.observe_first_tokens(2, 0.015)
    metrics.observe_tokens(3, 0.03)
    metrics.observe_end("stop")
    metrics.running_sessions.set(5)
    metrics.observe_engine("target", fake_target().info)
    metrics.observe_engine("draft", fake_target().info)
    return labelled(metrics.text(), {"deployment": "Router", "replica": "abc"})


def test_samples_are_repeated_with_vllms_labels() -> None:
    ours = router_text()
    text = with_vllm_names(ours, 'a "model"')
    assert text.startswith(ours)
    found = samples(text)
    where = {("deployment", "Router"), ("replica", "abc"), ("model_name", 'a "model"'), ("engine", "0")}

    def value(name: str, *labels: tuple[str, str]) -> float:
        return found[name, frozenset({*where, *labels})]

    assert value("vllm:spec_decode_num_draft_tokens_total") == 4
    assert value("vllm:spec_decode_num_accepted_tokens_total") == 3
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", ("position", "2")) == 1
    assert value("vllm:num_requests_running") == 5
    assert value("vllm:generation_tokens_total") == 5
    assert value("vllm:request_success_total", ("finished_reason", "stop")) == 1
    assert value("vllm:time_to_first_token_seconds_bucket", ("le", "0.02")) == 1
    assert value("vllm:inter_token_latency_seconds_count") == 3
    assert value("vllm:prefix_cache_queries_total") == 0
    info = fake_target().info
    size, number = str(info.block_size), str(info.num_blocks)
    assert value("vllm:cache_config_info", ("block_size", size), ("num_gpu_blocks", number)) == 1


def test_snapshots_are_those_of_the_target_and_the_ones_that_went_are_counted_on() -> None:
    metrics, info = RouterMetrics(), fake_target().info
    for held, evicted in ((3, 5), (4, 7), (1, 2)):
        metrics.observe_engine(
            "target", replace(info, num_snapshots_held=held, num_snapshots_evicted=evicted)
        )
        metrics.observe_engine("draft", info)
    found = {name: value for (name, _), value in samples(metrics.text()).items()}
    assert found["specray_target_snapshots"] == 1
    assert found["specray_target_snapshots_evicted_total"] == 7 + 2, "the engine has started anew"


def test_every_family_of_the_table_is_there_once() -> None:
    families = [family.name for family in text_string_to_metric_families(with_vllm_names(router_text(), "m"))]
    assert len(families) == len(set(families))
    assert {name.removesuffix("_total") for name in VLLM_NAMES.values()} <= set(families)
    assert not any(name.endswith("_created") for name in families)


async def test_names_come_by_option() -> None:
    for is_on in (False, True):
        config = parse_config({"served_model_name": MODEL, "metrics": {"vllm_names": is_on}})
        router = FakeRouterClient(info=INFO)

        async def text() -> str:
            return router_text()

        router.metrics_text = text  # type: ignore[method-assign]
        async with (
            serving(router, config=config) as service,
            service.http.get("/metrics") as response,
        ):
            assert ("vllm:num_requests_running" in await response.text()) == is_on
