"""Tests of ``bench serve``: its arithmetic, its readers, and a run against a scripted router."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from specray.bench.core.figures import Percentiles, percentile, percentiles
from specray.bench.core.samples import difference, histogram_quantile, parse_samples
from specray.bench.core.turns import speedup_in_turns
from specray.bench.load.client import ServerClient
from specray.bench.load.prompts import (
    BUILTIN_PROMPTS,
    Dataset,
    Prompt,
    load_labelled_prompts,
    load_prompts,
)
from specray.bench.load.serve import default_arms, measure, serve_arm, server_stats
from specray.bench.load.serve_report import serve_json, serve_table
from specray.bench.load.stats import Pass, RequestRecord, summarize
from specray.bench.plans import ServePlan
from specray.errors import ConfigError, EngineLostError, InvalidRequestError, OverloadedError
from specray.fakes import FakeRouterClient
from specray.telemetry.metrics import RouterMetrics
from tests.unit.serving.http.service import INFO, endless, serving


def record(started: float, events: tuple[float, ...], num_tokens: int, **counters: int) -> RequestRecord:
    return RequestRecord(started, events, events[-1] if events else started, 5, num_tokens, **counters)


# Statistics


@pytest.mark.parametrize("size", [1, 2, 7, 100])
@pytest.mark.parametrize("q", [0, 50, 90, 99, 100])
def test_percentile_equals_numpys(size: int, q: float) -> None:
    values = np.random.default_rng(size).normal(size=size).tolist()
    assert percentile(values, q) == pytest.approx(np.percentile(values, q), abs=1e-12)


def test_percentiles_of_nothing_are_none() -> None:
    assert percentiles([]) is None
    assert percentiles([1.0, 3.0]) == Percentiles(2.0, 2.8, 2.98, 2.0, 2)


def test_record_measures_from_start_and_between_events() -> None:
    one = record(10.0, (10.5, 10.625, 10.875), num_tokens=7)
    assert one.ttft_ms == 500.0
    assert one.itl_ms == (125.0, 250.0)
    # Six tokens after the first, however many events they came in.
    assert one.tpot_ms == 62.5


def test_record_without_text_or_of_one_token_has_no_times_between() -> None:
    assert record(0.0, (), num_tokens=0).ttft_ms is None
    assert record(0.0, (1.0,), num_tokens=1).tpot_ms is None
    assert record(0.0, (1.0,), num_tokens=1).itl_ms == ()


def test_summary_adds_up_over_passes() -> None:
    counters = {"num_spec_steps": 4, "num_draft_tokens": 16, "num_accepted_draft_tokens": 10}
    first = Pass((record(0.0, (0.25, 0.5), 10, **counters), record(0.0, (0.75, 1.0), 20)), 2.0)
    second = Pass((record(5.0, (5.5, 6.0), 30, **counters),), 1.0, num_failed=1)
    summary = summarize("on", [first, second])
    assert (summary.num_requests, summary.num_failed, summary.num_output_tokens) == (3, 1, 60)
    assert summary.tokens_per_s == 20.0
    assert summary.tokens_per_s_of_passes == (15.0, 30.0)
    assert summary.acceptance_rate == 20 / 32
    assert summary.mean_acceptance_length == 1 + 20 / 8
    assert summary.ttft_ms == Percentiles(500.0, 700.0, 745.0, 500.0, 3)
    assert summary.latency_ms is not None
    assert summary.latency_ms.p50 == 1000.0


def test_summary_without_drafts_or_requests_has_no_rates() -> None:
    summary = summarize("off", [Pass((), 0.0)])
    assert (summary.tokens_per_s, summary.acceptance_rate, summary.mean_acceptance_length) == (
        0.0,
        None,
        None,
    )
    assert summary.ttft_ms is None


# The server's metrics


def test_difference_of_two_readings_of_real_metrics() -> None:
    metrics = RouterMetrics()
    metrics.observe_round(4, 1)
    metrics.observe_lookup("miss_token", 0)
    metrics.verify_forward_s.observe(1.0)
    before = parse_samples(metrics.text())
    for overhead_s in (0.0011, 0.0013, 0.0017):
        metrics.round_overhead_s.observe(overhead_s)
        metrics.observe_round(4, 2)
    metrics.observe_lookup("hit", 3)
    metrics.observe_lookup("hit", 3)
    metrics.observe_lookup("miss_count", 0)
    metrics.verify_forward_s.observe(0.010)
    metrics.verify_forward_s.observe(0.030)
    stats = server_stats(difference(before, parse_samples(metrics.text())))
    assert stats.num_rounds == 3
    assert stats.hit_rate == pytest.approx(2 / 3)
    assert stats.verify_forward_ms_mean == pytest.approx(20.0)
    assert stats.draft_forward_ms_mean is None
    # One of three below 1.2 ms, the next in (1.2, 1.4]: the median lies half-way into that bucket.
    assert stats.round_overhead_ms_p50 == pytest.approx(1.3)


def test_stats_of_a_server_that_tells_nothing_are_none() -> None:
    stats = server_stats(parse_samples("# HELP x\nother_total 3\n"))
    assert (stats.round_overhead_ms_p50, stats.hit_rate, stats.num_rounds) == (None, None, 0.0)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"1": 2, "2": 4, "+Inf": 4}, 1.0),
        ({"1": 0, "2": 4, "+Inf": 4}, 1.5),
        ({"1": 1, "2": 5, "+Inf": 6}, 1.5),
        ({"1": 1, "2": 1, "+Inf": 4}, 2.0),
        ({"1": 0, "2": 0, "+Inf": 0}, None),
    ],
)
def test_histogram_quantile_is_that_of_promql(counts: dict[str, int], expected: float | None) -> None:
    text = "".join(f'x_bucket{{le="{bound}"}} {count}\n' for bound, count in counts.items())
    assert histogram_quantile(parse_samples(text), "x", 0.5) == expected


def test_samples_keep_labels_in_any_order_and_with_quotes() -> None:
    samples = parse_samples('a{y="2",x="1"} 3\nb{t="say \\"hi\\", {x}"} 1e3\n')
    assert samples["a", (("x", "1"), ("y", "2"))] == 3
    assert sorted(samples.values()) == [3.0, 1000.0]


# Prompts


def test_humaneval_is_read_from_gzip_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"prompt": "def a():"}\n\n{"prompt": "def b():"}\n')
    assert load_prompts(Dataset.HUMANEVAL, path, 3) == ["def a():", "def b():", "def a():"]
    assert load_prompts(Dataset.HUMANEVAL, path, 1) == ["def a():"]


def test_specbench_gives_first_turns(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text('{"question_id": 1, "turns": ["one", "two"]}\n')
    assert load_prompts(Dataset.SPECBENCH, path, 1) == ["one"]


def test_specbench_is_spread_over_its_categories(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    entries = [{"category": name, "turns": [f"{name}{n}"]} for name in ("a", "b") for n in range(3)]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    found = load_labelled_prompts(Dataset.SPECBENCH, path, 3)
    assert found == [Prompt("a0", "a"), Prompt("a2", "a"), Prompt("b1", "b")]
    assert [prompt.text for prompt in load_labelled_prompts(Dataset.SPECBENCH, path, 7)][6] == "a0"


def test_builtin_prompts_need_no_file() -> None:
    assert load_prompts(Dataset.BUILTIN, None, 2) == list(BUILTIN_PROMPTS[:2])


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "no prompt in it"),
        ("{", "not JSON"),
        ('{"turns": []}', "line 1: there is no prompt"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_is_a_config_error(tmp_path: Path, content: str | None, part: str) -> None:
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=part):
        load_prompts(Dataset.HUMANEVAL, path, 5)


def test_a_data_set_without_its_file_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="--dataset-path is missing"):
        load_prompts(Dataset.SPECBENCH, None, 5)


# A run


async def run(router: FakeRouterClient, **options: Any) -> Any:
    prompts = options.pop("prompts", [Prompt("a"), Prompt("b")])
    arms, run_id = options.pop("arms", default_arms()), options.pop("run_id", None)
    values: dict[str, Any] = {"max_tokens": 4, "num_warmup": 0, "fresh_prompts": False} | options
    progress: list[tuple[str, int, int]] = []
    async with serving(router) as service:
        plan = ServePlan(url=service.url, **values)
        result = await measure(plan, prompts, arms, lambda *done: progress.append(done), run_id=run_id)
    return result, progress


async def test_arms_take_turns_over_the_same_prompts() -> None:
    router = FakeRouterClient(info=INFO)
    result, progress = await run(router, num_repeats=2, num_warmup=1)
    enabled = [request.speculation.enabled for request in router.requests]
    assert enabled == [False, True, *[False, False, True, True] * 2]
    assert [step[0].split()[-1] for step in progress] == ["off", "off", "on", "on"] * 2
    assert progress[-1] == ("speculation on", 8, 8)
    off, on = (arm.summary for arm in result.arms)
    assert (off.num_requests, off.num_output_tokens, off.num_prompt_tokens) == (4, 16, 4)
    # The fake's SpeculationStats(2, 8, 4, ...).
    assert (on.acceptance_rate, on.mean_acceptance_length) == (0.5, 3.0)
    assert result.model == "tiny"
    assert {request.max_tokens for request in router.requests} == {4}
    assert {request.eos_token_ids for request in router.requests} == {()}


async def test_each_pass_of_each_run_has_a_part_of_the_prefix_cache_of_its_own_unless_asked() -> None:
    router = FakeRouterClient(info=INFO)
    for run_id in "rs":
        await run(router, num_repeats=2, num_warmup=1, fresh_prompts=True, run_id=run_id)
    salts = [request.sampling.cache_salt for request in router.requests]
    assert salts[:2] == ["r, off, warm-up", "r, on, warm-up"]
    assert salts[2:10:2] == ["r, off, pass 1", "r, on, pass 1", "r, off, pass 2", "r, on, pass 2"]
    assert salts[2:10:2] == salts[3:10:2]
    assert set(salts[:10]).isdisjoint(salts[10:])
    assert len({request.prompt_token_ids for request in router.requests}) == 2
    shared = FakeRouterClient(info=INFO)
    await run(shared, num_repeats=2, num_warmup=1)
    assert {request.sampling.cache_salt for request in shared.requests} == {""}


async def test_a_chat_is_the_prompt_behind_the_template_and_has_a_part_of_the_cache_of_its_own() -> None:
    router = FakeRouterClient(info=INFO)
    result, _ = await run(
        router,
        num_repeats=1,
        chat=True,
        fresh_prompts=True,
        run_id="r",
        prompts=[Prompt("a", "x"), Prompt("b", "y")],
    )
    salts = [request.sampling.cache_salt for request in router.requests]
    assert salts == ["r, off, pass 1"] * 2 + ["r, on, pass 1"] * 2
    # Both arms ask the same.
    asked = [request.prompt_token_ids for request in router.requests]
    assert asked[:2] == asked[2:]
    assert {name: one.num_output_tokens for name, one in result.arms[1].categories.items()} == {
        "x": 4,
        "y": 4,
    }
    assert result.arms[0].summary.ttft_ms is not None


async def test_concurrency_bounds_the_requests_in_flight() -> None:
    are_three = asyncio.Event()

    class Counting(FakeRouterClient):
        running, peak = 0, 0

        async def stream(self, request: Any) -> Any:
            Counting.running += 1
            Counting.peak = max(Counting.peak, Counting.running)
            if Counting.running == 3:
                are_three.set()
            async with asyncio.timeout(10):
                await are_three.wait()
            async for chunk in super().stream(request):
                yield chunk
            Counting.running -= 1

    router = Counting(info=INFO)
    await run(router, prompts=[Prompt("a")] * 12, concurrency=3, arms=[serve_arm("on")], num_repeats=1)
    assert Counting.peak == 3
    assert len(router.requests) == 12


async def test_without_streaming_the_counts_are_the_same() -> None:
    router = FakeRouterClient(info=INFO)
    result, _ = await run(router, stream=False, num_repeats=1)
    on = result.arms[1].summary
    assert (on.num_output_tokens, on.acceptance_rate, on.ttft_ms, on.itl_ms) == (8, 0.5, None, None)
    assert on.latency_ms is not None


async def test_failed_requests_are_counted_and_told() -> None:
    router = FakeRouterClient(info=INFO, errors=[OverloadedError("queues are full")])
    result, _ = await run(router, num_repeats=1)
    off, on = result.arms
    assert (off.summary.num_failed, off.summary.num_requests, on.summary.num_failed) == (1, 1, 0)
    assert off.errors == ["queues are full"]


async def test_result_as_json_and_as_a_table() -> None:
    result, _ = await run(FakeRouterClient(info=INFO), arms=default_arms([3]))
    values = json.loads(json.dumps(serve_json(result)))
    assert [arm["name"] for arm in values["arms"]] == ["off", "on", "K=3"]
    assert values["arms"][2]["speculation"] == {"enabled": True, "num_speculative_tokens": 3}
    assert values["plan"]["max_tokens"] == 4
    console = Console(width=200, record=True)
    console.print(serve_table(result))
    text = console.export_text()
    assert "tiny: 2 prompts, 4 new tokens, 1 at a time" in text
    assert "1.00x" in text


def test_passes_are_compared_with_those_beside_them() -> None:
    # The machine was half as fast from the second pass on; the arm is faster by 1.1, 1.2 and 1.3.
    mean, error = speedup_in_turns((110.0, 60.0, 65.0), (100.0, 50.0, 50.0)) or (0.0, 0.0)
    assert mean == pytest.approx(1.2)
    assert error == pytest.approx(0.1 / 3**0.5)
    assert speedup_in_turns((110.0, 60.0), (100.0, 50.0)) is None
    assert speedup_in_turns((110.0, 60.0, 1.0), (100.0, 50.0, 0.0)) is None


async def test_the_table_has_the_speedup_of_each_pass_and_how_sure_it_is() -> None:
    result, _ = await run(FakeRouterClient(info=INFO), num_repeats=3)
    console = Console(width=200, record=True)
    console.print(serve_table(result))
    assert "1.000 ± 0.000" in console.export_text()


# The client


async def test_client_turns_answers_into_our_errors() -> None:
    errors = [OverloadedError("full", retry_after_s=4), EngineLostError("lost")]
    router = FakeRouterClient(info=INFO, errors=errors)
    async with serving(router) as service, ServerClient(service.url + "/v1/") as client:
        with pytest.raises(OverloadedError) as overloaded:
            await anext(client.stream_completion({"prompt": "a"}))
        with pytest.raises(EngineLostError, match="lost"):
            await anext(client.stream_completion({"prompt": "a"}))
        with pytest.raises(InvalidRequestError, match="400: temperature is 9") as invalid:
            await anext(client.stream_completion({"prompt": "a", "temperature": 9}))
    assert overloaded.value.retry_after_s == 4
    assert invalid.value.field == "temperature"


async def test_client_has_a_deadline() -> None:
    async with serving(endless()) as service, ServerClient(service.url, timeout_s=0.2) as client:
        with pytest.raises(EngineLostError):
            await anext(client.stream_completion({"prompt": "a"}))


async def test_client_without_a_server_says_so() -> None:
    async with ServerClient("http://127.0.0.1:9") as client:
        with pytest.raises(EngineLostError, match=r"127\.0\.0\.1:9"):
            await client.model()
