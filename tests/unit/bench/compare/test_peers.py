"""Tests of the adapters: exact command lines, what is missing, and how servers are started and ended."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from specray.bench.compare.peers import Launch, PeerArm, Setup, System, parse_arm, process, running
from specray.bench.compare.peers.llama_cpp import LlamaCpp
from specray.bench.compare.peers.own import Specray
from specray.bench.compare.peers.process import NEVER_EPHEMERAL, free_port
from specray.bench.compare.peers.transformers import Transformers
from specray.bench.compare.peers.vllm import Vllm
from specray.errors import ConfigError, EngineLostError
from tests.processes import is_running, wait_gone

SETUP = Setup(Path("/m/target"), Path("/m/draft"), 2, 1024, 32, Path("/w"))
SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        Specray(),
        Transformers(),
        Vllm(Path("/v/python")),
        LlamaCpp(Path("/l"), Path("/g/q4.gguf")),
    )
}


def command(arm: str) -> str:
    parsed = parse_arm(arm, SYSTEMS)
    launch = SYSTEMS[parsed.system].launch(parsed, SETUP, 8041)
    assert launch.url == "http://127.0.0.1:8041"
    return " ".join(launch.argv).replace(sys.executable, "PYTHON")


OWN = (
    "PYTHON -m specray.cli serve --target /m/target --draft {draft} --dtype bfloat16 --max-model-len 1024 "
    "--port 8041 --grpc-port 0 {more}--set target.num_threads=2 --set target.max_num_seqs=32 "
    "--set draft.max_num_seqs=32"
)
GENERATE = (
    "PYTHON -m specray.bench.compare.peers.generate_server --target /m/target --port 8041 --num-threads 2"
)
VLLM = (
    "env VLLM_CPU_KVCACHE_SPACE=4 VLLM_CPU_OMP_THREADS_BIND=0-1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 "
    "/v/python -m vllm.entrypoints.openai.api_server --model /m/target --dtype bfloat16 --host 127.0.0.1 "
    "--port 8041 --max-model-len 1024 --max-num-seqs 32 --generation-config vllm"
)
LLAMA = (
    "/l/build/bin/llama-server --model /w/target.gguf --host 127.0.0.1 --port 8041 --threads 2 "
    "--threads-batch 2 --parallel 32 --ctx-size 32768 --no-jinja --chat-template chatml"
)


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ("specray:plain", OWN.format(draft="none", more="")),
        ("specray:serial", OWN.format(draft="/m/draft", more="--overlap serial ")),
        ("specray:auto:3", OWN.format(draft="/m/draft", more="--overlap auto --num-speculative-tokens 3 ")),
        ("specray:ngram", OWN.format(draft="ngram", more="")),
        ("specray:plain@int4", OWN.format(draft="none", more="") + " --set target.quantization=int4"),
        (
            "specray:serial:2@int8",
            OWN.format(draft="/m/draft", more="--overlap serial --num-speculative-tokens 2 ")
            + " --set target.quantization=int8",
        ),
        ("transformers:plain", GENERATE),
        ("transformers:draft:5", f"{GENERATE} --draft /m/draft --num-speculative-tokens 5"),
        ("transformers:ngram", f"{GENERATE} --prompt-lookup 4"),
        ("vllm:plain", VLLM),
        ("llama.cpp:plain", LLAMA),
        ("llama.cpp:plain@bfloat16", LLAMA),
        ("llama.cpp:plain@gguf", LLAMA.replace("/w/target.gguf", "/g/q4.gguf")),
        (
            "llama.cpp:draft:3",
            f"{LLAMA} --spec-type draft-simple --spec-draft-model /w/draft.gguf --spec-draft-n-max 3 "
            "--spec-draft-threads 2",
        ),
        (
            "llama.cpp:ngram:6",
            f"{LLAMA} --spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 6",
        ),
    ],
)
def test_command_line(arm: str, expected: str) -> None:
    assert command(arm) == expected


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        (
            "vllm:draft",
            {"method": "draft_model", "model": "/m/draft", "num_speculative_tokens": 4},
        ),
        (
            "vllm:draft-probabilistic:2",
            {
                "method": "draft_model",
                "model": "/m/draft",
                "num_speculative_tokens": 2,
                "draft_sample_method": "probabilistic",
            },
        ),
        (
            "vllm:ngram:5",
            {
                "method": "ngram",
                "num_speculative_tokens": 5,
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
            },
        ),
    ],
)
def test_vllm_speculation_is_one_json_value(arm: str, expected: dict[str, Any]) -> None:
    parsed = parse_arm(arm, SYSTEMS)
    argv = SYSTEMS["vllm"].launch(parsed, SETUP, 1).argv
    assert json.loads(argv[argv.index("--speculative-config") + 1]) == expected
    assert argv[-2:] == ("--per-request-spec-decode-metrics", "summary")


def test_weights_that_a_system_does_not_have_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--arm vllm:plain@int4: vllm has no weights 'int4'; allowed: bfloat16$"
    ):
        parse_arm("vllm:plain@int4", SYSTEMS)
    with pytest.raises(ConfigError, match=r"llama\.cpp has no weights 'gguf'; allowed: bfloat16$"):
        parse_arm("llama.cpp:plain@gguf", {"llama.cpp": LlamaCpp(Path("/l"))})
    assert parse_arm("specray:serial:3@int4", SYSTEMS).name == "specray serial K=3 int4"


def test_peers_sample_from_the_whole_distribution() -> None:
    assert LlamaCpp(None).request_fields(0.7) == {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert LlamaCpp(None).request_fields(0.0)["top_k"] == 1
    assert Vllm(None).request_fields(1.0) == {"top_p": 1.0, "top_k": 0}


# What is there


def test_every_system_has_a_plain_mode_first() -> None:
    assert {system.modes[0] for system in SYSTEMS.values()} == {"plain"}


def test_absent_peers_say_why(tmp_path: Path) -> None:
    assert Specray().absence() is None
    assert Transformers().absence() is None
    assert Vllm(None).absence() == "--vllm-python is not given"
    assert Vllm(tmp_path / "python").absence() == f"--vllm-python {tmp_path}/python: there is no such file"
    assert Vllm(Path(sys.executable)).absence() is None
    assert LlamaCpp(None).absence() == "--llama-cpp is not given"
    peer = LlamaCpp(tmp_path)
    assert peer.absence() == f"--llama-cpp {tmp_path}: there is no build/bin/llama-server in it"
    (tmp_path / "build" / "bin").mkdir(parents=True)
    (tmp_path / "build" / "bin" / "llama-server").touch()
    assert peer.absence() == f"--llama-cpp {tmp_path}: there is no convert_hf_to_gguf.py in it"
    (tmp_path / "convert_hf_to_gguf.py").touch()
    assert peer.absence() is None


def test_arm_names() -> None:
    assert parse_arm("vllm:draft:4", SYSTEMS).name == "vllm draft K=4"
    assert parse_arm("specray:auto", SYSTEMS) == PeerArm("specray", "auto", None)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("tgi:plain", "there is no system 'tgi'; allowed: specray, transformers, vllm, llama.cpp"),
        ("vllm", "vllm has no mode ''; allowed: plain, draft, draft-probabilistic, ngram"),
        ("vllm:medusa", "has no mode 'medusa'"),
        ("vllm:draft:0", "K is '0'; allowed: 1..32"),
        ("vllm:draft:33", "K is '33'"),
        ("vllm:draft:x", "K is 'x'"),
    ],
)
def test_a_wrong_arm_is_a_config_error(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_arm(text, SYSTEMS)
    assert part in str(error.value)


# Processes

SERVE = "import http.server, sys; http.server.test(http.server.SimpleHTTPRequestHandler, port={port})"


def launch(code: str, port: int = 1, **environment: str) -> Launch:
    return Launch((sys.executable, "-c", code), f"http://127.0.0.1:{port}", "/", environment)


def test_ports_are_not_those_that_the_system_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Linux hands out those from 32768 on, Ray's workers have 10002 to 19999.
    assert (NEVER_EPHEMERAL.start, NEVER_EPHEMERAL.stop) == (20_000, 32_768)
    with socket.socket() as listener:
        taken = free_port()
        listener.bind(("127.0.0.1", taken))
        monkeypatch.setattr(process, "NEVER_EPHEMERAL", range(taken, taken + 1))
        with pytest.raises(EngineLostError, match=f"none of 100 ports of {taken} to {taken} is free"):
            free_port()
    assert free_port() == taken


async def test_a_server_and_its_children_are_gone_afterwards(tmp_path: Path) -> None:
    port = free_port()
    code = (
        "import os, signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'])\n"
        f"open('{tmp_path}/pids', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"assert os.environ['NAME'] == 'a value'\n" + SERVE.format(port=port)
    )
    async with running(launch(code, port, NAME="a value"), tmp_path / "log", start_timeout_s=30) as url:
        assert url == f"http://127.0.0.1:{port}"
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(is_running(pid) for pid in pids)
    assert wait_gone(*pids)


async def test_a_server_that_ends_at_once_is_told_with_its_last_lines(tmp_path: Path) -> None:
    one = launch("import sys; print('no such model', file=sys.stderr); sys.exit(3)")
    with pytest.raises(EngineLostError, match="ended with 3 before it was ready: no such model"):
        async with running(one, tmp_path / "log", start_timeout_s=30):
            raise AssertionError("it never was ready")


@pytest.mark.slow
async def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    code = f"import os, time; open('{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(EngineLostError, match=r"was not ready within 0\.5 s"):
        async with running(launch(code, free_port()), tmp_path / "log", start_timeout_s=0.5):
            raise AssertionError("it never was ready")
    assert not is_running(int((tmp_path / "pid").read_text()))


# The server around generate()


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from tests.unit.engine.model.checkpoints import write_checkpoint

    directory = tmp_path_factory.mktemp("pair")
    return write_checkpoint(directory / "target", "llama"), write_checkpoint(
        directory / "draft", "llama", seed=1
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "draft", "ngram"])
async def test_generate_server_streams_what_generate_makes(
    mode: str, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from specray.bench.compare.peers.generate_server import build_app, load_generator, parse_arguments
    from specray.bench.load.client import ServerClient
    from specray.tokenization import load_tokenizer

    setup = Setup(*tiny_pair, 1, 64, 1, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(setup.target, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    prompt = [5, 6, 7, 5, 6]
    output = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    expected = load_tokenizer(setup.target).decode(output.tolist())
    # What the request says of the end of sequence must win over the checkpoint.
    (setup.target / "generation_config.json").write_text(json.dumps({"eos_token_id": output[3].item()}))
    argv = Transformers().launch(PeerArm("transformers", mode, 3), setup, free_port()).argv
    arguments = parse_arguments(list(argv[argv.index("--target") :]))
    runner = web.AppRunner(build_app(load_generator(arguments)))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", arguments.port).start()
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    async with ServerClient(f"http://127.0.0.1:{arguments.port}", timeout_s=60) as client:
        events = [event async for event in client.stream_completion(body)]
        sampled = [e async for e in client.stream_completion({**body, "temperature": 0.7})]
    await runner.cleanup()
    assert "".join(event.text for event in events) == expected
    usage = {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    assert events[-1].body["usage"] == sampled[-1].body["usage"] == usage
    if mode == "plain":
        assert len(events) == 13
