"""Tests of ``bench plain``: the arithmetic, what is asked of the server and when, and the errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from specray.bench.forwards import ForwardCost
from specray.bench.load.client import ServerClient
from specray.bench.load.run import send
from specray.bench.load.stats import Pass, RequestRecord
from specray.bench.plain import (
    PlainResult,
    PlainTurn,
    make_turn,
    measure_plain,
    plain_json,
    plain_table,
    served_model,
    token_ms,
)
from specray.bench.plans import PlainPlan
from specray.errors import ConfigError, InvalidRequestError, OverloadedError, SpecrayError
from specray.fakes import FakeRouterClient
from specray.requests import GenerateRequest, OutputChunk
from tests.unit.cli import harness
from tests.unit.serving.http.service import INFO, MODEL, serving

ONE_ROW = ForwardCost(num_sequences=1, num_rows=1, forward_ms=12.5, bound_ms=10.0, weight_bytes=200_000_000)
SIX_ROWS = ForwardCost(num_sequences=1, num_rows=6, forward_ms=15.0, bound_ms=11.0, weight_bytes=200_000_000)
COSTS = [ONE_ROW, SIX_ROWS]


def run(*arguments: str) -> int:
    return harness.run("bench", "plain", *arguments)


def record(
    events: tuple[float, ...] = (1.0,), ended: float = 2.0, num_tokens: int = 66, num_first: int | None = 2
) -> RequestRecord:
    return RequestRecord(0.5, events, ended, 5, num_tokens, num_first_tokens=num_first)


# Arithmetic


def test_token_takes_its_share_of_the_whole_stream_after_the_first_event() -> None:
    # From 1 s to 3 s came 64 of the 66 tokens, whenever the events between were.
    assert token_ms(record((1.0, 1.25, 2.875), ended=3.0)) == 31.25


@pytest.mark.parametrize(
    ("one", "kind", "message"),
    [
        (record(num_first=None), SpecrayError, "do not tell their usage"),
        (record((), num_first=None), SpecrayError, "an output has no text"),
        (record(num_tokens=7, num_first=7), ConfigError, r"--max-tokens: .* had 7, .*; allowed: 8 and more"),
    ],
)
def test_stream_without_a_time_per_token(one: RequestRecord, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        token_ms(one)


def test_turn_sets_the_median_request_against_the_linear_layers_at_one_row() -> None:
    ended = (1.0 + 64 * 0.016, 1.0 + 64 * 0.020, 1.0 + 64 * 0.100)
    turn = make_turn(Pass(tuple(record(ended=each) for each in ended), 11.0), COSTS)
    assert turn.figures == pytest.approx(
        {
            "tokens_per_s": 18.0,
            "token_ms": 20.0,
            "bound_ms": 10.0,
            "http_share": 0.5,
            "forward_ms": 12.5,
            "forward_share": 0.8,
            "six_rows_ratio": 1.2,
            "bandwidth_gb_s": 20.0,
        }
    )


def result_of_three_turns() -> PlainResult:
    """In the second the whole machine was half as fast, in the third the server alone."""
    slow = ForwardCost(1, 1, 25.0, 20.0, 200_000_000)
    turns = (
        PlainTurn(50.0, 16.0, ONE_ROW, SIX_ROWS),
        PlainTurn(25.0, 32.0, slow, ForwardCost(1, 6, 40.0, 22.0, 200_000_000)),
        PlainTurn(20.0, 40.0, ONE_ROW, SIX_ROWS),
    )
    return PlainResult(PlainPlan(num_turns=3), "m", turns, ("full",))


def test_median_of_the_shares_is_not_the_share_of_the_medians() -> None:
    medians = result_of_three_turns().medians
    # 10/16, 20/32 and 10/40; the medians' would be 10/32.
    assert medians["http_share"] == 0.625
    assert (medians["token_ms"], medians["bound_ms"], medians["forward_ms"]) == (32.0, 10.0, 12.5)
    assert (medians["forward_share"], medians["six_rows_ratio"]) == (0.8, 1.2)


def test_table_has_a_column_per_turn_and_the_medians() -> None:
    console = Console(width=120, record=True)
    with console.capture() as capture:
        console.print(plain_table(result_of_three_turns(), title="a title"))
    rows = {}
    for line in capture.get().splitlines():
        heading, *cells = [cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")]
        rows[heading] = cells
    assert rows["tokens/s over HTTP"] == ["50.0", "25.0", "20.0", "25.0"]
    assert rows["bound share over HTTP"] == ["0.625", "0.625", "0.250", "0.625"]
    assert rows["bound share of the forward"] == ["0.800", "0.800", "0.800", "0.800"]
    assert rows["6 rows over 1"] == ["1.200", "1.600", "1.200", "1.200"]
    assert rows["weights GB/s"] == ["20.0", "10.0", "20.0", "20.0"]


def test_json_has_the_turns_with_their_forwards_and_no_prompts() -> None:
    values = json.loads(json.dumps(plain_json(result_of_three_turns())))
    assert (values["model"], values["errors"], values["medians"]["token_ms"]) == ("m", ["full"], 32.0)
    assert values["plan"]["num_turns"] == 3
    second = values["turns"][1]
    assert (second["http_share"], second["six_rows_ratio"]) == (0.625, 1.6)
    assert [cost["num_rows"] for cost in second["forwards"]] == [1, 6]
    assert second["forwards"][1]["forward_ms"] == 40.0


# A run


class Watched(FakeRouterClient):
    """A router that counts requests under way, and their maximum."""

    num_running, peak = 0, 0

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        self.num_running += 1
        self.peak = max(self.peak, self.num_running)
        try:
            async for chunk in super().stream(request):
                await asyncio.sleep(0)
                yield chunk
        finally:
            self.num_running -= 1


async def measure(router: FakeRouterClient, **options: Any) -> tuple[PlainResult, list[tuple[str, int, int]]]:
    values: dict[str, Any] = {"max_tokens": 8, "num_turns": 1, "num_warmup": 0}
    told: list[tuple[str, int, int]] = []
    forwards = options.pop("forwards", lambda: COSTS)
    async with serving(router) as service:
        plan = PlainPlan(url=service.url, **{**values, **options})
        result = await measure_plain(plan, ["a", "b"], MODEL, forwards, lambda *done: told.append(done))
    return result, told


async def test_passes_are_plain_one_at_a_time_and_in_turns_with_the_forwards() -> None:
    router = Watched(info=INFO, chunk_size=3)
    seen: list[tuple[int, int]] = []

    def forwards() -> list[ForwardCost]:
        seen.append((len(router.requests), router.num_running))
        return COSTS

    result, told = await measure(router, num_turns=2, num_warmup=1, forwards=forwards)
    # A warm-up and two prompts in each turn; the server is idle while forwards are measured.
    assert (seen, len(router.requests), router.peak) == ([(0, 0), (3, 0)], 6, 1)
    assert {request.speculation.enabled for request in router.requests} == {False}
    assert {request.eos_token_ids for request in router.requests} == {()}
    assert {request.max_tokens for request in router.requests} == {8}
    # None can be in the prefix cache.
    assert len({(request.prompt_token_ids, request.sampling.cache_salt) for request in router.requests}) == 6
    assert told == [
        *(("forwards", 0, 6), ("over HTTP", 1, 6), ("over HTTP", 2, 6), ("over HTTP", 3, 6)),
        *(("forwards", 3, 6), ("over HTTP", 4, 6), ("over HTTP", 5, 6), ("over HTTP", 6, 6)),
    ]
    assert (result.model, result.errors, len(result.turns)) == (MODEL, (), 2)
    assert all(turn.one_row is ONE_ROW and turn.six_rows is SIX_ROWS for turn in result.turns)


async def test_first_event_tells_its_tokens_where_that_is_asked_for() -> None:
    body = {"prompt": "a", "max_tokens": 8}
    async with (
        serving(FakeRouterClient(info=INFO, chunk_size=3)) as service,
        ServerClient(service.url) as client,
    ):
        told = await send(client, {**body, "stream_options": {"continuous_usage_stats": True}})
        silent = await send(client, body)
    assert (told.num_first_tokens, told.num_output_tokens) == (3, 8)
    assert (silent.num_first_tokens, silent.num_output_tokens) == (None, 8)


async def test_output_that_comes_in_one_event_is_too_short() -> None:
    with pytest.raises(ConfigError, match="--max-tokens: an output had 8, all in its first event"):
        await measure(FakeRouterClient(info=INFO, chunk_size=8))


async def test_failed_request_is_told_and_the_others_count() -> None:
    result, _ = await measure(FakeRouterClient(info=INFO, errors=[OverloadedError("queues are full")]))
    assert result.errors == ("queues are full",)
    assert len(result.turns) == 1


async def test_turn_without_an_answer_is_an_error() -> None:
    router = FakeRouterClient(info=INFO, errors=[OverloadedError("full"), OverloadedError("still full")])
    with pytest.raises(SpecrayError, match="no request of turn 1 was answered: full"):
        await measure(router)


async def test_what_the_server_refuses_is_told_by_the_warm_up() -> None:
    with pytest.raises(InvalidRequestError, match=r"max_tokens is -1; allowed: 1\.\."):
        await measure(FakeRouterClient(info=INFO), max_tokens=-1, num_warmup=1)


# The server


@asynccontextmanager
async def answering(models: str) -> AsyncIterator[str]:
    """Runs a server whose list of models is this text."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=models)

    app = web.Application()
    app.add_routes([web.get("/v1/models", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_the_one_model_is_named() -> None:
    async with answering('{"data": [{"id": "a"}]}') as url:
        assert await served_model(url) == "a"


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ('{"data": [{"id": "a"}, {"id": "b"}]}', r"which serves 2 models \(a, b\); allowed: 1"),
        ("<html>", "no list of models; allowed: the address of a running server"),
    ],
)
async def test_server_with_other_than_one_model_is_refused(models: str, message: str) -> None:
    async with answering(models) as url:
        with pytest.raises(ConfigError, match=f"--url is {url}.*{message}"):
            await served_model(url)


# The command


def test_server_that_is_away_ends_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--url", "http://127.0.0.1:9") == 2
    error = capsys.readouterr().err
    assert error.startswith("specray: --url is http://127.0.0.1:9: ")
    assert error.endswith("; allowed: the address of a running server\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--dtype", "fp8"], "target.dtype"),
        (["--num-threads", "0"], "target.num_threads"),
        (["--max-tokens", "1"], "--max-tokens"),
        (["--num-turns", "0"], "--num-turns"),
        (["--dataset", "humaneval"], "--dataset-path is missing"),
    ],
)
def test_wrong_option_ends_with_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert part in capsys.readouterr().err


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records what the command builds and measures in its own process, which costs nothing here."""
    made: list[Any] = []

    def build_runner(engine: Any, *, role: str) -> str:
        made.append((role, engine.model, engine.dtype, engine.num_threads, engine.max_num_seqs))
        return "a runner"

    def measure_forwards(runner: str, **options: Any) -> list[ForwardCost]:
        made.append((runner, options))
        return COSTS

    monkeypatch.setattr("specray.environment.apply_thread_environment", lambda: None)
    monkeypatch.setattr("specray.engine.runner.assembly.build_runner", build_runner)
    monkeypatch.setattr("specray.bench.forwards.measure_forwards", measure_forwards)
    return made


async def run_against(router: FakeRouterClient, options: str) -> int:
    async with serving(router) as service:
        return await asyncio.to_thread(run, "--url", service.url, *options.split())


async def test_command_measures_the_named_target_and_writes_its_report(
    calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plain.json"
    router = FakeRouterClient(info=INFO)
    options = (
        "--target /models/x --dtype float32 --num-threads 2 --num-prompts 1 --num-turns 2 --max-tokens 6 "
        f"--num-warmup 0 --context-len 100 --num-repeats 3 --json {path}"
    )
    assert await run_against(router, options) == 0
    measured = ("a runner", {"rows": (1, 6), "context_len": 100, "num_repeats": 3})
    assert calls == [("target", "/models/x", "float32", 2, 1), measured, measured]
    values = json.loads(path.read_text())
    assert (values["target"], values["dtype"], values["num_threads"]) == ("/models/x", "float32", 2)
    assert [turn["bound_ms"] for turn in values["turns"]] == [10.0, 10.0]
    assert values["medians"]["forward_share"] == 0.8
    assert [request.max_tokens for request in router.requests] == [6, 6]
    assert "tiny over HTTP, /models/x in float32 here" in capsys.readouterr().out


async def test_failed_request_is_told_and_ends_with_1(
    calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    router = FakeRouterClient(info=INFO, errors=[OverloadedError("queues are full")])
    options = f"--dataset humaneval --dataset-path {path} --num-prompts 2 --num-turns 1 --num-warmup 0"
    assert await run_against(router, f"{options} --max-tokens 6") == 1
    captured = capsys.readouterr()
    # Other tests of the process may have set up logs.
    assert "failed: queues are full" in captured.err.splitlines()
    assert "bound share over HTTP" in captured.out
    # Without options: the embedded target, bfloat16, as many threads as the server's.
    assert calls[0] == ("target", "embedded", "bfloat16", None, 1)


async def test_a_server_without_a_model_is_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def empty(self: ServerClient, path: str) -> str:
        return '{"data": []}'

    monkeypatch.setattr(ServerClient, "_get", empty)
    with pytest.raises(SpecrayError, match="/v1/models lists no model"):
        await ServerClient("http://127.0.0.1:1").model()
