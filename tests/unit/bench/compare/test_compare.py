"""Tests of a comparison: turns, continuation and failures, over real HTTP servers in processes of their
own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specray.bench.compare.journal import Journal, PassRow
from specray.bench.compare.peers import Launch, PeerArm, Setup, System
from specray.bench.compare.plan import ComparePlan
from specray.bench.compare.run import AskedPrompts, Progress, Run, checkpoint_digest, compare
from specray.errors import ConfigError
from specray.tokenization import load_tokenizer
from tests.unit.cli import harness
from tests.unit.tokenization.tiny_tokenizer import write_tiny_tokenizer

# Servers are processes.
pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("fake_peer.py")


class FakeSystem:
    modes = ("plain", "draft")
    weights = ("bfloat16",)

    def __init__(self, name: str, log: Path, *options: str, max_concurrency: int | None = None) -> None:
        self.name = name
        self.max_concurrency = max_concurrency
        self._log = log
        self._options = options

    def absence(self) -> str | None:
        return None

    def prepare(self, setup: Setup, arms: Sequence[PeerArm]) -> None:
        pass

    def launch(self, arm: PeerArm, setup: Setup, port: int) -> Launch:
        command = [sys.executable, str(PROGRAM), "--name", arm.name, "--log", str(self._log)]
        command += ["--port", str(port), *self._options]
        return Launch(tuple(command), f"http://127.0.0.1:{port}", "/health", {})

    def request_fields(self, temperature: float) -> dict[str, Any]:
        return {"top_k": 0 if temperature else 1}


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(write_tiny_tokenizer(tmp_path), tmp_path, 2, 64, 2, tmp_path)


PLAN = ComparePlan(
    concurrency=[1, 2],
    temperature=[0.0, 1.0],
    num_turns=2,
    num_prompts=1,
    max_tokens=4,
    num_warmup=1,
    max_model_len=64,
)
ARMS = (PeerArm("a", "plain"), PeerArm("b", "draft", 3))
TEXTS = ["def", "hello"]


def systems(log: Path, *options: str) -> dict[str, System]:
    return {"a": FakeSystem("a", log), "b": FakeSystem("b", log, *options)}


async def run(
    plan: ComparePlan, setup: Setup, known: dict[str, System] | None = None, **options: Any
) -> tuple[Journal, Progress]:
    journal = Journal(setup.work_dir / "passes.jsonl", {"threads": 2})
    known = known or systems(setup.work_dir / "log")
    return journal, await compare(plan, Run(known, ARMS, setup, {}), TEXTS, journal, **options)


def events(setup: Setup) -> list[dict[str, Any]]:
    path = setup.work_dir / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_arms_take_turns_and_only_one_server_runs_at_a_time(setup: Setup) -> None:
    said: list[str] = []
    journal, outcome = await run(PLAN, setup, on_progress=said.append)
    assert outcome == Progress(True, {})
    starts_and_ends = [(one["name"], one["event"]) for one in events(setup) if one["event"] != "request"]
    turn = [("a plain", "start"), ("a plain", "end"), ("b draft K=3", "start"), ("b draft K=3", "end")]
    assert starts_and_ends == turn * 2
    assert said[0] == "turn 1 of 2: a plain"
    assert said[3] == "turn 2 of 2: b draft K=3"
    assert [row.key for row in journal.rows[:5]] == [
        (0, "a plain", 0.0, 1),
        (0, "a plain", 0.0, 2),
        (0, "a plain", 1.0, 1),
        (0, "a plain", 1.0, 2),
        (0, "b draft K=3", 0.0, 1),
    ]
    assert len(journal.rows) == 16
    # llama.cpp's form of the counters.
    assert {row.acceptance_rate for row in journal.rows} == {0.75}
    assert {row.num_requests for row in journal.rows if row.concurrency == 2} == {2}
    assert {(row.num_failed, row.num_short) for row in journal.rows} == {(0, 0)}


async def test_every_system_reads_the_same_token_ids_and_no_prompt_comes_twice(setup: Setup) -> None:
    await run(replace(PLAN, num_turns=1), setup)
    bodies = {name: [e["body"] for e in events(setup) if e["event"] == "request" and e["name"] == name]
              for name in ("a plain", "b draft K=3")}  # fmt: skip
    a, b = bodies.values()
    # Several requests at once have no order.
    assert a[0]["prompt"] == b[0]["prompt"]
    assert sorted(body["prompt"] for body in a) == sorted(body["prompt"] for body in b)
    tokenizer = load_tokenizer(setup.target)
    assert tokenizer.decode(a[0]["prompt"]) == "# warm-up\ndef"
    # The burst of the warm-up repeats its single request; no measured prompt is in another pass.
    measured = [tuple(body["prompt"]) for body in a[3:]]
    assert len(measured) == len(set(measured)) == 6
    assert {tokenizer.decode(prompt) for prompt in measured} == {
        f"# {cell}\n{prompt}"
        for cell, prompts in {
            "0 1": ["def"],
            "0 2": ["def", "hello"],
            "1 1": ["def"],
            "1 2": ["def", "hello"],
        }.items()
        for prompt in prompts
    }
    last = a[-1]
    assert (last["temperature"], last["top_k"], last["ignore_eos"], last["max_tokens"]) == (1.0, 0, True, 4)
    assert last["model"] == "a plain"
    assert "seed" not in last


async def test_a_system_of_one_request_is_not_asked_for_more(setup: Setup) -> None:
    log = setup.work_dir / "log"
    known: dict[str, System] = {"a": FakeSystem("a", log, max_concurrency=1), "b": FakeSystem("b", log)}
    journal, _ = await run(replace(PLAN, num_turns=1), setup, known)
    assert [row.concurrency for row in journal.rows if row.system == "a"] == [1, 1]
    assert [row.concurrency for row in journal.rows if row.system == "b"] == [1, 2, 1, 2]


async def test_a_run_goes_on_where_it_ended(setup: Setup) -> None:
    _, outcome = await run(replace(PLAN, time_limit_s=0.0), setup)
    assert outcome == Progress(False, {})
    assert events(setup) == []
    one_turn = replace(PLAN, num_turns=1)
    await run(one_turn, setup)
    num_events = len(events(setup))
    journal, _ = await run(one_turn, setup)
    assert len(events(setup)) == num_events
    assert len(journal.rows) == 8
    journal, outcome = await run(PLAN, setup)
    assert outcome.is_complete
    assert [row.turn for row in journal.rows] == [0] * 8 + [1] * 8


async def test_an_arm_whose_server_does_not_start_is_told_and_the_others_are_measured(setup: Setup) -> None:
    known, said = systems(setup.work_dir / "log", "--no-such-option"), list[str]()
    journal, outcome = await run(PLAN, setup, known, on_progress=said.append)
    assert outcome.is_complete
    assert {row.arm for row in journal.rows} == {"a plain"}
    assert list(outcome.failed) == ["b draft K=3"]
    assert "ended with 2 before it was ready" in outcome.failed["b draft K=3"]
    assert "--no-such-option" in outcome.failed["b draft K=3"]
    # At once, not behind the last turn.
    assert said[2] == f"b draft K=3 was not measured: {outcome.failed['b draft K=3']}"


async def test_prompts_that_are_too_long_for_the_servers_are_refused_before_one_starts(setup: Setup) -> None:
    with pytest.raises(ConfigError) as caught:
        await run(replace(PLAN, max_model_len=8), setup)
    num_tokens = len(load_tokenizer(setup.target).encode("# warm-up\nhello")) + PLAN.max_tokens
    assert str(caught.value) == (
        f"--max-model-len is 8; allowed: {num_tokens} or more, the longest prompt with its output"
    )
    assert events(setup) == []


async def test_an_arm_that_refuses_requests_fails_in_its_warm_up(setup: Setup) -> None:
    journal, outcome = await run(PLAN, setup, systems(setup.work_dir / "log", "--status", "500"))
    message = "the warm-up failed: the server answers 500: out of order"
    assert outcome.failed == {"b draft K=3": message}
    assert {row.arm for row in journal.rows} == {"a plain"}


async def test_outputs_that_end_early_are_counted(setup: Setup) -> None:
    known = systems(setup.work_dir / "log", "--num-missing", "1")
    journal, _ = await run(replace(PLAN, num_turns=1), setup, known)
    short = {(row.system, row.concurrency): row.num_short for row in journal.rows}
    assert short == {("a", 1): 0, ("a", 2): 0, ("b", 1): 1, ("b", 2): 2}


async def test_the_server_log_begins_with_its_command_line(setup: Setup) -> None:
    await run(replace(PLAN, num_turns=1), setup)
    first = (setup.work_dir / "b-draft-K=3.log").read_text().splitlines()[0]
    assert first.startswith(f"{sys.executable} {PROGRAM} --name 'b draft K=3' --log ")


def test_cell_prompts_are_as_many_as_the_concurrency_or_more(setup: Setup) -> None:
    tokenizer = load_tokenizer(setup.target)
    prompts = AskedPrompts(replace(PLAN, num_prompts=4), ["a"] * 9, tokenizer)
    assert [len(prompts.of("", n)) for n in (1, 4, 9)] == [4, 4, 9]


def test_repeated_prompts_are_the_same_in_every_pass(setup: Setup) -> None:
    tokenizer = load_tokenizer(setup.target)
    plan = replace(PLAN, fresh_prompts=False)
    assert AskedPrompts(plan, TEXTS, tokenizer).of("0 1", 2) == [
        list(tokenizer.encode(text)) for text in TEXTS
    ]


def test_chats_stand_in_the_template_behind_the_line_of_their_pass(setup: Setup) -> None:
    (setup.target / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    tokenizer = load_tokenizer(setup.target)
    plan = replace(PLAN, chat=True)
    assert AskedPrompts(plan, TEXTS, tokenizer).of("0 1", 2) == [
        list(tokenizer.encode(f"<# 0 1\n{text}>", add_special_tokens=False)) for text in TEXTS
    ]


# The journal

ROW = PassRow(0, "a", "a plain", 0.7, 4, 10.5, 1.0, None, 2.0, None, None, 4, 1, 0, ("lost",))


def test_a_journal_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "passes.jsonl"
    Journal(path, {"threads": 2}).add(ROW)
    again = Journal(path, {"threads": 2})
    assert again.rows == [ROW]
    assert again.has(0, "a plain", 0.7, 4)
    assert not again.has(1, "a plain", 0.7, 4)
    assert again.conditions == {"threads": 2}


def test_a_journal_of_other_conditions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "passes.jsonl"
    Journal(path, {"threads": 2, "dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="holds a run with threads = 2, this one has 1; allowed: the same"):
        Journal(path, {"threads": 1, "dtype": "bfloat16"})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"conditions": {}}\n{"turn": 0}'])
def test_a_file_that_is_no_journal_is_a_config_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "passes.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is not the journal of a comparison"):
        Journal(path, {})


def test_checkpoints_with_other_weights_have_other_digests(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"1" * 100)
    before = checkpoint_digest(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_digest(tmp_path) == before
    assert checkpoint_digest(path) == before, "a file that is all of a checkpoint, as GGUF's are"
    path.write_bytes(b"1" * 99 + b"2")
    assert checkpoint_digest(tmp_path) != before


# The command


def call(*arguments: str) -> int:
    return harness.run("bench", "compare", *arguments)


def test_a_run_goes_on_with_its_gguf_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, file = tmp_path / "run", tmp_path / "q4.gguf"
    for content, code in ((b"1", 0), (b"1", 0), (b"2", 2)):
        file.write_bytes(content)
        assert call("--out", str(out), "--arm", "llama.cpp:plain@gguf", "--gguf", str(file)) == code
    assert "holds a run with GGUF file = 'q4.gguf " in " ".join(capsys.readouterr().err.split())


def test_the_command_reports_absent_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "run"
    assert call("--out", str(out), "--arm", "vllm:plain", "--arm", "llama.cpp:draft:4") == 0
    text = (out / "report.md").read_text()
    assert "- vllm is absent: --vllm-python is not given\n" in text
    assert "- llama.cpp is absent: --llama-cpp is not given\n" in text
    assert "transformers" not in text
    assert capsys.readouterr().out.strip() == text.strip()
    conditions = json.loads((out / "report.json").read_text())["conditions"]
    assert (conditions["new tokens per prompt"], conditions["most requests at a time"]) == (128, 32)
    assert sorted(path.name for path in out.iterdir()) == [
        "latency.svg",
        "passes.jsonl",
        "report.json",
        "report.md",
        "throughput.svg",
    ]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--arm", "vllm:fast"], "vllm has no mode 'fast'"),
        (["--target", "/no/such"], "--target /no/such: there is no config.json; allowed: a checkpoint's"),
        (["--dataset", "humaneval"], "--dataset-path is missing"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: Not a directory"),
    ],
)
def test_wrong_options_end_with_2(
    arguments: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--out", str(tmp_path / "run"), *arguments) == 2
    assert part in capsys.readouterr().err


def test_another_number_of_tokens_in_the_same_directory_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = ("--out", str(tmp_path), "--arm", "vllm:plain")
    assert call(*same) == 0
    assert call(*same, "--max-tokens", "64") == 2
    assert "holds a run with new tokens per prompt = 128, this one has 64" in capsys.readouterr().err
