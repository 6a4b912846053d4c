"""Tests of wrong configurations at the start: one clear line, exit code 2, and no Ray."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from transformers import AutoConfig, T5Config

from specray.actors.causes import root_cause
from specray.cli.app import run
from specray.config import parse_config
from specray.errors import ConfigError
from specray.serving import launch
from specray.serving.own_ray import start
from tests.unit.engine.model.checkpoints import write_checkpoint

pytestmark = pytest.mark.slow

EXIT_WRONG_INPUT = 2


@pytest.fixture(autouse=True)
def no_ray() -> Iterator[None]:
    yield
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pair")
    write_checkpoint(directory / "target", "llama")
    write_checkpoint(directory / "draft", "llama", seed=1)
    return directory


def serve(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Runs ``specray serve``, which must not start; returns its message."""
    with socket.socket() as http, socket.socket() as grpc:
        http.bind(("127.0.0.1", 0))
        grpc.bind(("127.0.0.1", 0))
        ports = [str(item.getsockname()[1]) for item in (http, grpc)]
    options = [str(argument) for argument in arguments]
    for name, port in zip(("--port", "--grpc-port"), ports, strict=True):
        if name not in options:
            options += [name, port]
    assert run(["serve", *options]) == EXIT_WRONG_INPUT
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    return output.err


@pytest.mark.parametrize("option", ["--port", "--grpc-port"])
def test_port_in_use(capsys: pytest.CaptureFixture[str], pair: Path, option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = serve(capsys, "--target", pair / "target", "--draft", pair / "draft", option, port)
    field = {"--port": "http.port", "--grpc-port": "grpc.port"}[option]
    assert f"{field}: cannot listen on 127.0.0.1:{port}: Address already in use" in said


def test_same_port_twice(capsys: pytest.CaptureFixture[str], pair: Path) -> None:
    said = serve(
        capsys, "--target", pair / "target", "--draft", pair / "draft", "--port", 18431, "--grpc-port", 18431
    )
    assert "grpc.port: 18431 is http.port as well; they must differ" in said


def test_missing_model(capsys: pytest.CaptureFixture[str], pair: Path) -> None:
    said = serve(capsys, "--target", pair / "nowhere", "--draft", pair / "draft")
    assert f"{pair / 'nowhere'}" in said
    assert "does not exist" in said


def test_missing_weights(capsys: pytest.CaptureFixture[str], pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair / "draft", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    said = serve(capsys, "--target", pair / "target", "--draft", tmp_path)
    assert "holds no *.safetensors file" in said


def test_unsupported_architecture(capsys: pytest.CaptureFixture[str], pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair / "target", tmp_path, dirs_exist_ok=True)
    T5Config().save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).is_encoder_decoder
    said = serve(capsys, "--target", tmp_path, "--draft", pair / "draft")
    assert "allowed: decoder-only causal language models" in said


def test_draft_with_another_tokenizer(capsys: pytest.CaptureFixture[str], pair: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", vocab_size=97)
    said = serve(capsys, "--target", pair / "target", "--draft", tmp_path)
    assert "draft.model:" in said
    assert "has another tokenizer than the target" in said


@pytest.mark.parametrize("role", ["draft", "target"])
def test_ranks_that_cannot_share_the_heads(capsys: pytest.CaptureFixture[str], pair: Path, role: str) -> None:
    models = ("--target", pair / "target", "--draft", pair / "draft")
    said = serve(capsys, *models, "--set", f"{role}.tensor_parallel_size=3")
    assert f"{role}.tensor_parallel_size is 3, which must divide the model's num_key_value_heads of 2" in said


def test_max_model_len_beyond_the_model(capsys: pytest.CaptureFixture[str], pair: Path) -> None:
    said = serve(capsys, "--target", pair / "target", "--draft", pair / "draft", "--max-model-len", 100_000)
    assert "max_model_len is 100000" in said
    assert "allows at most 128" in said


@pytest.mark.parametrize(
    ("address", "asked", "server"),
    [
        (None, "auto", "ingress"),
        ("", "auto", "ingress"),
        ("10.0.0.5:6379", "auto", "proxy"),
        ("10.0.0.5:6379", "ingress", "ingress"),
        (None, "proxy", "proxy"),
    ],
)
def test_who_listens_in_a_ray_of_its_own_and_in_a_cluster_that_is_joined(
    monkeypatch: pytest.MonkeyPatch, address: str | None, asked: str, server: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert launch.with_own_server(parse_config({"http": {"server": asked}})).http.server == server


def test_root_cause_of_a_start_that_failed_in_an_actor() -> None:
    message = (
        "The deployment failed to start 3 times in a row. Error:\n"
        "ray::TargetRank.start() (pid=1)\n"
        "specray.errors.ConfigError: cache_memory_gib is 0.001; one sequence needs 0.005 GiB\n"
        "\n"
        "The above exception was the direct cause of the following exception:\n"
        "specray.errors.EngineLostError: the target did not start: ray::TargetRank.start()\n"
    )
    assert root_cause(["", message]) == "cache_memory_gib is 0.001; one sequence needs 0.005 GiB"
    assert root_cause(["first\nlast line\n"]) == "last line"
    assert root_cause(["", ""]) == "Serve does not say why"


def test_what_ray_does_to_signals_is_undone() -> None:
    before = start.signal_handlers()
    try:
        signal.signal(signal.SIGTERM, lambda *_: None)
        start.restore_handlers(before)
        assert start.signal_handlers() == before
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])


def test_a_model_that_chats_is_asked_a_question(tmp_path: Path) -> None:
    config = parse_config({"target": {"model": str(tmp_path)}, "served_model_name": "chatty"})
    path, body = launch.example_call(config)
    assert (path, json.loads(body)) == (
        "/v1/completions",
        {"model": "chatty", "prompt": "def fibonacci(n):\n", "max_tokens": 64},
    )
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    path, body = launch.example_call(config)
    assert (path, json.loads(body)) == (
        "/v1/chat/completions",
        {
            "model": "chatty",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 64,
            "temperature": 0,
        },
    )
    # Its chat template only leads to code.
    assert launch.example_call(parse_config({}))[0] == "/v1/completions"


def test_a_gguf_file_that_was_not_converted_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.touch()
    with pytest.raises(
        ConfigError, match="is a GGUF file; allowed: the checkpoint that `specray models fetch`"
    ):
        launch.check_models(parse_config({"target": {"model": str(file)}, "draft": {"enabled": False}}))
