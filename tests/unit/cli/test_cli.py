"""Tests of the command line: options over files, errors on one line, and imports of --help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specray import __version__
from specray.cli.generate import Sampling, from_server, print_pieces
from specray.cli.settings import build_config, pair_options
from specray.config import Config, read_config_file
from specray.errors import ConfigError
from specray.fakes import FakeRouterClient
from specray.types import DraftKind, Overlap, Verification
from tests.processes import is_running, wait_gone
from tests.unit.cli.harness import run
from tests.unit.serving.http.service import INFO, REPLY, say, serving


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"specray {__version__}\n"


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom specray.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'ray', 'transformers', 'grpc', 'fastapi', 'aiohttp', 'pydantic'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_serve_puts_options_over_the_file(served: list[Config], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "target: {model: /models/big, dtype: float32}\ndraft: {model: /models/small}\nhttp: {port: 1}\n"
    )
    options = (
        "--port 8123 --grpc-port 0 --host 0.0.0.0 --dtype bfloat16 --num-speculative-tokens 5 "
        "--overlap serial "
        "--verification rejection --served-model-name m --max-model-len 128 --tensor-parallel-size 2 "
        "--num-draft-replicas 3 --device cpu --set router.max_queued_requests=9 --set target.num_threads=2"
    )
    assert run("serve", str(path), *options.split()) == 7
    (config,) = served
    assert (config.target.model, config.draft.model) == ("/models/big", "/models/small")
    assert (config.http.port, config.http.host, config.grpc.host, config.grpc.port) == (
        8123,
        "0.0.0.0",
        "0.0.0.0",
        0,
    )
    assert (config.target.dtype, config.draft.dtype) == ("bfloat16", "bfloat16")
    assert config.speculation.num_speculative_tokens == 5
    assert config.speculation.overlap is Overlap.SERIAL
    assert config.speculation.verification is Verification.REJECTION
    assert (config.served_model_name, config.target.max_model_len, config.draft.max_model_len) == (
        "m",
        128,
        128,
    )
    assert (config.target.tensor_parallel_size, config.draft.num_replicas) == (2, 3)
    assert (config.router.max_queued_requests, config.target.num_threads) == (9, 2)


def test_serve_without_a_draft(served: list[Config]) -> None:
    run("serve", "--target", "/models/big", "--draft", "none", "--num-speculative-tokens", "auto")
    assert served[0].draft.enabled is False
    assert served[0].speculation.num_speculative_tokens == "auto"


@pytest.mark.parametrize("name", ["ngram", "suffix", "lookahead"])
def test_serve_with_a_draft_that_needs_no_model(served: list[Config], name: str) -> None:
    run("serve", "--target", "/models/big", "--draft", name)
    (config,) = served
    assert (config.draft.enabled, config.draft.has_model) == (True, False)
    assert config.draft.kind_in_use is DraftKind(name)


def test_worker_for_a_draft_that_needs_no_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("worker", "draft", "--listen", "unix:/none", "--model", "suffix") == 2
    assert "draft.model is 'suffix'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--dtype", "fp8"], "target.dtype"),
        (["--num-speculative-tokens", "33"], "33"),
        (["--num-speculative-tokens", "many"], "'many'"),
        (["--overlap", "more"], "speculation.overlap"),
        (["--port", "0"], "http.port"),
        (["--tensor-parallel-size", "0"], "target.tensor_parallel_size"),
        (["--target", "/models/big"], "--draft none"),
        (["--draft", "n-gram"], "draft.model is 'n-gram'"),
        (["--draft", "n-gram"], "allowed: embedded, ngram, suffix"),
        (
            ["--set", "speculation.fallback=tree"],
            "speculation.fallback: Input should be 'none', 'ngram' or 'suffix'",
        ),
        (["--set", "speculation.past_output_tokens=-1"], "speculation.past_output_tokens"),
        (["--set", "router.nothing=1"], "router.nothing"),
        (["--set", "nothing"], "allowed: dotted.key=value"),
        (["--set", "http.port.x=1"], "http.port.x"),
        (["--set", "http={"], "not YAML"),
        (["/no/such/file.yaml"], "/no/such/file.yaml: No such file"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_settings_end_with_2_and_one_line(
    served: list[Config], capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    if arguments[0] == "--set" and arguments[1].startswith("http.port"):
        arguments = [*arguments[:1], "http.port=1", *arguments]
    assert run("serve", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("specray: ")
    assert part in captured.err
    assert "Traceback" not in captured.err
    assert served == []


@pytest.mark.parametrize("content", ["- a\n", "a: [\n", "nothing: 1\n"])
def test_a_wrong_file_ends_with_2(
    served: list[Config], capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    assert run("serve", str(path)) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_unknown_option_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--nope") == 2
    assert "--nope" in capsys.readouterr().err


def test_pair_options_say_nothing_by_default() -> None:
    assert set(pair_options().values()) == {None}


def test_config_of_no_options_keeps_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("draft:\n")
    assert build_config(path, pair_options(dtype="float32")).draft.dtype == "float32"
    plain = build_config(path, pair_options(weights="dtype"))
    assert (plain.target.weights, plain.draft.weights) == ("dtype", "dtype")
    assert read_config_file(path) == {"draft": None}


@pytest.mark.parametrize("role", ["draft", "target"])
def test_worker_builds_its_engine_from_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, role: str
) -> None:
    seen: dict[str, Any] = {}

    def serve_engine(factory: Any, **options: Any) -> None:
        seen.update(options)
        seen["config"] = factory()

    def alone(config: Config, *, parallel: None) -> Config:
        assert parallel is None
        return config

    monkeypatch.setattr("specray.rpc.workers.worker.serve_engine", serve_engine)
    build = ModuleType("specray.engine.build")  # The real one would import torch.
    build.__dict__.update(dict.fromkeys(("build_draft_engine", "build_target_engine"), alone))
    monkeypatch.setitem(sys.modules, "specray.engine.build", build)
    address = f"unix:{tmp_path}/x.sock"
    arguments = ["--listen", address, "--model", "/models/x", "--dtype", "float32", "--num-threads", "2"]
    assert run("worker", role, *arguments) == 0
    engine = getattr(seen["config"], role)
    assert (engine.model, engine.dtype, engine.num_threads) == ("/models/x", "float32", 2)
    assert (seen["role"], seen["address"]) == (role, address)
    assert seen["options"].security.is_open
    assert run("worker", role, *arguments, "--set", "rpc.secret_file=/etc/secret") == 0
    assert seen["options"].security.secret_file == "/etc/secret"


def test_worker_without_an_address_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("worker", "target") == 2
    assert "--listen is missing; allowed: unix:/path or host:port" in capsys.readouterr().err


def test_bench_without_a_command_is_bench_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--url", "http://127.0.0.1:9", "--num-prompts", "1") == 1
    assert "specray: server http://127.0.0.1:9: " in capsys.readouterr().err


def test_bench_of_a_missing_data_set_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "serve", "--dataset", "humaneval") == 2
    assert "--dataset-path is missing" in capsys.readouterr().err


async def test_generate_from_a_server_prints_text_and_stats(capsys: pytest.CaptureFixture[str]) -> None:
    router = say(REPLY)
    sampling = Sampling(max_tokens=8, temperature=0.5, top_p=1.0, seed=3, stop=["zzz"], speculation=True)
    async with serving(router) as service:
        await print_pieces(from_server(service.url, "def", sampling))
    captured = capsys.readouterr()
    assert captured.out == "hello hello, a \ufffd\n"
    assert "8 tokens" in captured.err
    assert "4 of 8 draft tokens accepted (0.50), mean acceptance length 3.00" in captured.err
    (request,) = router.requests
    assert (request.sampling.temperature, request.sampling.seed, request.stop) == (0.5, 3, ("zzz",))
    assert request.speculation.enabled


async def test_generate_from_a_server_can_be_plain(capsys: pytest.CaptureFixture[str]) -> None:
    router = FakeRouterClient(info=INFO)
    sampling = Sampling(max_tokens=2, temperature=0, top_p=1, seed=None, stop=[], speculation=False)
    async with serving(router) as service:
        await print_pieces(from_server(service.url, "a", sampling))
    assert capsys.readouterr().out == "aa\n"
    assert not router.requests[0].speculation.enabled


def test_generate_without_its_server_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "a", "--server", "http://127.0.0.1:9") == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_build_config_refuses_before_it_parses() -> None:
    with pytest.raises(ConfigError, match=r"draft\.model is not set for the target /x"):
        build_config(None, {"target.model": "/x"})


@pytest.mark.slow
def test_worker_with_parent_ends_when_its_parent_is_killed() -> None:
    child = (
        "import sys, time\nfrom specray.rpc.workers.parent import end_with_parent\n"
        "end_with_parent(int(sys.argv[1]), period_s=0.01)\ntime.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"command = [sys.executable, '-c', {child!r}, str(os.getpid())]\n"
        "print(subprocess.Popen(command).pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_running(pid)
        process.kill()
    assert wait_gone(pid)


def test_bench_router_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "router.json"
    arguments = ["--num-tokens", "20", "--num-sessions", "1", "--num-sessions", "2", "--json", str(path)]
    assert run("bench", "router", *arguments) == 0
    assert [row["num_sessions"] for row in json.loads(path.read_text())] == [1, 2]
    assert "num_sessions" in capsys.readouterr().out


def test_bench_to_a_directory_that_is_not_there_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no" / "x.json"
    assert run("bench", "router", "--num-tokens", "20", "--num-sessions", "1", "--json", str(path)) == 2
    assert f"--json {path}: No such file" in capsys.readouterr().err
