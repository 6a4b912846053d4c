"""What `specray serve` shows of itself, to whom, and where it listens: the command as users start it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc import aio

from specray.bench.compare.peers.process import free_port
from specray.rpc.inference.client import SpecrayClient
from specray.rpc.inference.types import GenerateParams
from tests.e2e.calls import DEADLINE_S, complete, eventually, metric, replicas
from tests.e2e.listeners import descendants, listeners

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

START_S = 180.0
PROMPT = "def a_name_that_must_not_be_logged(value):\n"
ASKED = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACE = f"00-{TRACE_ID}-b7ad6b7169203331-01"
DASHBOARD = Path(__file__).resolve().parents[2] / "helm" / "specray" / "dashboards" / "specray.json"
REPLICAS = {"Router": 2, "Ingress": 2, "Draft": 1}


@dataclass(frozen=True, slots=True)
class Command:
    """A running ``specray serve``."""

    process: int
    home: Path
    http_port: int
    grpc_port: int
    url: str

    @property
    def logs(self) -> Path:
        """Directory of the logs of all processes. Ray names it after the one that the command guards."""
        sessions = Path(tempfile.gettempdir()) / "ray"
        processes = descendants(self.process)
        (session,) = [found for process in processes for found in sessions.glob(f"session_*_{process}")]
        return session / "logs"

    def ray_token(self) -> str:
        """Token that Ray's processes show each other."""
        environment = Path(f"/proc/{descendants(self.process)[-1]}/environ").read_bytes().split(b"\0")
        (entry,) = [entry for entry in environment if entry.startswith(b"RAY_AUTH_TOKEN=")]
        return entry.partition(b"=")[2].decode()

    def written(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.logs.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    home = tmp_path_factory.mktemp("home")
    # Compiled kernels are no secret, and compiling takes a minute.
    kernels = Path.home() / ".cache" / "specray"
    kernels.mkdir(parents=True, exist_ok=True)
    (home / ".cache").mkdir()
    (home / ".cache" / "specray").symlink_to(kernels)
    engine = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "num_threads": 1, "profile_s": 0}
    values = {
        "target": {**engine, "model": "embedded"},
        "draft": engine,
        "speculation": {"num_speculative_tokens": 4},
        "router": {"num_replicas": REPLICAS["Router"], "start_timeout_s": 120},
        "ingress": {"num_replicas": REPLICAS["Ingress"]},
        "http": {"port": free_port()},
        "grpc": {"port": free_port()},
        "logging": {"format": "json"},
        "telemetry": {"traces": "console"},
    }
    path = home / "config.yaml"
    path.write_text(json.dumps(values))
    # As a user's environment: nothing sets how Ray authenticates.
    unset = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    with (home / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "specray.cli", "serve", str(path)],
            env={**environment, "HOME": str(home)},
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{values['http']['port']}"
    try:
        _wait_ready(process, url, home / "output")
        yield Command(process.pid, home, values["http"]["port"], values["grpc"]["port"], url)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert process.returncode == 0


def _wait_ready(process: subprocess.Popen[bytes], url: str, output: Path) -> None:
    async def is_ready() -> bool:
        try:
            async with aiohttp.ClientSession(url) as http, http.get("/ready") as response:
                return response.status == 200
        except OSError:
            return False

    end = time.monotonic() + START_S
    while not asyncio.run(is_ready()):
        assert process.poll() is None and time.monotonic() < end, output.read_text()
        time.sleep(0.2)


@pytest.fixture
async def http(command: Command) -> Any:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(command.url, timeout=timeout) as session:
        yield session


def objects(command: Command) -> list[dict[str, Any]]:
    """Returns every JSON object that a process has written on a line of its own."""
    found = []
    for line in command.written().splitlines():
        if line.startswith("{") and line.endswith("}"):
            found.append(json.loads(line))
    return found


def test_nothing_listens_beyond_loopback(command: Command) -> None:
    found = listeners(command.process)
    assert {command.http_port, command.grpc_port} <= {entry.port for entry in found}
    # Ray's control, its agents, every worker, Serve's replicas.
    names = {entry.process for entry in found}
    assert {"gcs_server", "raylet", "ray::TargetRank"} <= names
    assert [entry for entry in found if not entry.is_local] == []


async def test_ray_answers_only_who_has_this_services_token(command: Command) -> None:
    assert not (command.home / ".ray" / "auth_token").exists()
    (gcs,) = [entry for entry in listeners(command.process) if entry.process == "gcs_server"]
    token = command.ray_token()
    codes = []
    for offered in (None, "wrong", token):
        metadata = None if offered is None else (("authorization", f"Bearer {offered}"),)
        async with aio.insecure_channel(f"127.0.0.1:{gcs.port}") as channel:
            call: Any = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo", None, None)
            try:
                await call(b"", timeout=10, metadata=metadata)
                codes.append(grpc.StatusCode.OK)
            except aio.AioRpcError as error:
                codes.append(error.code())
    assert codes == [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK]


async def test_any_ingress_shows_the_metrics_of_every_replica(http: aiohttp.ClientSession) -> None:
    async def are_all_there() -> bool:
        return await replicas(http, *REPLICAS) == REPLICAS

    # One Router is enough for the service to be ready; the other may still load its target.
    await eventually(are_all_there, "every replica is there", deadline_s=START_S)
    answers = [await complete(http, **ASKED) for _ in range(8)]
    num_tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    for _ in range(4):
        assert await are_all_there()
        # Each look at readiness, while nothing else is done, is a request of at most one token: it ends with
        # the target's next verdict, and two that look at the same time need only one.
        num_looks = await metric(http, "specray_requests_total") - len(answers)
        assert num_tokens <= await metric(http, "specray_output_tokens_total") <= num_tokens + num_looks
        calls = {"name": "POST /v1/completions", "code": "200"}
        assert await metric(http, "specray_ingress_calls_total", **calls) == len(answers)
        assert await metric(http, "specray_draft_replica_routers") == REPLICAS["Router"]


async def test_the_dashboard_asks_for_what_a_scrape_holds(http: aiohttp.ClientSession) -> None:
    async with http.get("/metrics") as response:
        text = await response.text()
    families = {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    expressions = re.findall(r'"expr": "(.*)"', DASHBOARD.read_text(encoding="utf-8"))
    asked = {name for expression in expressions for name in re.findall(r"\bspecray_\w+", expression)}
    assert len(asked) > 30
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in asked} - families == set()


async def test_a_request_is_followed_by_its_ids_through_logs_and_spans(
    command: Command, http: aiohttp.ClientSession
) -> None:
    named = {"X-Request-Id": "my-own-id", "traceparent": TRACE}
    async with http.post("/v1/completions", json=ASKED, headers=named) as response:
        assert response.status == 200
        assert response.headers.getall("X-Request-Id") == ["my-own-id"]
        answer = await response.json()

    def lines() -> list[dict[str, Any]]:
        return [entry for entry in objects(command) if entry.get("request_id") == answer["id"]]

    (line,) = await eventually(lines, "the request's line")
    usage = answer["usage"]
    assert (line["client_request_id"], line["code"], line["deployment"]) == ("my-own-id", "200", "Ingress")
    assert (line["num_prompt_tokens"], line["num_output_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert 0 < line["ttft_ms"] < line["duration_ms"]

    def spans() -> dict[str, dict[str, Any]]:
        found = {
            entry["name"]: entry
            for entry in objects(command)
            if entry.get("context", {}).get("trace_id") == f"0x{TRACE_ID}"
        }
        return found if len(found) == 5 else {}

    found = await eventually(spans, "five spans")
    request, generate = found["POST /v1/completions"], found["generate"]
    assert request["parent_id"] == f"0x{TRACE.split('-')[2]}"
    assert generate["parent_id"] == request["context"]["span_id"]
    assert {found[name]["parent_id"] for name in ("queue", "prefill", "rounds")} == {
        generate["context"]["span_id"]
    }
    assert generate["attributes"]["specray.request_id"].startswith(answer["id"])
    assert found["rounds"]["attributes"]["specray.num_rounds"] > 0
    times = [
        found[name][end] for name in ("queue", "prefill", "rounds") for end in ("start_time", "end_time")
    ]
    assert times == sorted(times)
    assert request["start_time"] <= times[0] and times[-1] <= request["end_time"]


async def test_a_grpc_call_is_logged_under_the_id_that_its_caller_got(command: Command) -> None:
    async with SpecrayClient(f"127.0.0.1:{command.grpc_port}") as client:
        params = GenerateParams(text=PROMPT, max_tokens=4)
        events = [event async for event in client.generate(params, timeout_s=DEADLINE_S)]

    def lines() -> list[dict[str, Any]]:
        return [entry for entry in objects(command) if entry.get("request_id") == events[0].request_id]

    (line,) = await eventually(lines, "the call's line")
    assert (line["message"], line["num_output_tokens"]) == ("Generate OK", 4)


async def test_no_process_writes_what_was_asked_or_answered(
    command: Command, http: aiohttp.ClientSession
) -> None:
    answer = await complete(http, **ASKED)
    text = answer["choices"][0]["text"].strip()
    assert len(text) > 10

    def once_logged() -> str:
        written = command.written()
        return written if answer["id"] in written else ""

    written = await eventually(once_logged, "the request's line")
    assert "a_name_that_must_not_be_logged" not in written
    assert text not in written
