"""The script for accelerators runs on a CPU, at a tiny size, and says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.bench.gpu import run as runs
from specray.bench.gpu import stage
from specray.bench.gpu.pair import OutputAgreement, arms_of, compare, num_compared
from specray.bench.gpu.report import problems, write_report
from specray.cli.app import run
from specray.config import EMBEDDED
from specray.errors import ConfigError
from specray.serving.local import pair as pair_module
from tests.unit.engine.processes import forked_worker


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specray.cli", "bench", "gpu", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


class StagesHere:
    """Stages in this process: each would import torch and transformers again."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        pass

    def run(self, label: str, name: str, **arguments: Any) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(
            json.dumps(stage.run_stage(name, json.loads(json.dumps(arguments))))
        )
        return result


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Runs the script in this process; only the engines of the pair are processes of their own: the draft a
    program, as on a device, the target forked."""
    start_program = pair_module.start_worker

    def worker(role: str, *arguments: Any, **options: Any) -> Any:
        return (start_program if role == "draft" else forked_worker)(role, *arguments, **options)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(runs, "Stages", StagesHere)
    monkeypatch.setattr(pair_module, "start_worker", worker)

    def run_all(*arguments: str) -> None:
        assert run(["bench", "gpu", *arguments]) == 0

    yield run_all
    torch.set_num_threads(before)


def test_whole_run_on_a_cpu_gives_equal_tokens_and_every_figure(
    tmp_path: Path, run_here: Callable[..., None]
) -> None:
    sizes = ("--num-prompts", "2", "--max-tokens", "12", "--num-repeats", "1", "--k", "2")
    options = ("--shape", "tiny", "--device", "cpu", "--dtype", "float32", *sizes)
    stages = ("--stage", "forwards", "--stage", "determinism", "--stage", "pair", "--stage", "transformers")
    run_here(*options, *stages, "--report", str(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == []
    results = report["shapes"]["tiny"]
    assert sorted(results) == [
        "checkpoint",
        "determinism",
        "forwards",
        "pair float32",
        "transformers float32",
    ]
    steps = [
        (time["num_sequences"], time["width"], time["on_equal"]) for time in results["determinism"]["times"]
    ]
    assert steps == [(1, 1, 1), (1, 3, 3), (2, 1, 1), (2, 3, 3), (1, 40, 40)]
    assert results["forwards"]["attentions"]["gather"] == "measured"
    assert "not work here" in results["forwards"]["attentions"]["triton"]
    measured = {
        (time["is_captured"], time["num_sequences"], time["width"]) for time in results["forwards"]["times"]
    }
    assert measured == {(captured, n, w) for captured in (False, True) for n in (1, 2) for w in (1, 3)}
    pair = results["pair float32"]
    assert [arm["arm"] for arm in pair["arms"]] == 2 * ["off", "serial K=2", "enumerate K=2"]
    assert [entry["num_equal"] for entry in pair["agreements"]] == [2, 2, 2, 2]
    assert [entry["num_tokens"] for entry in pair["agreements"]] == [24, 24, 24, 24]
    assert pair["greedy"] == results["transformers float32"]["greedy"]
    text = (tmp_path / "report.md").read_text()
    assert "| enumerate K=2 | 1.00 |" in text and "greedy: 2 of 2." in text


@pytest.mark.slow
def test_a_mixture_on_a_cpu_gives_equal_tokens(tmp_path: Path, run_here: Callable[..., None]) -> None:
    sizes = ("--num-prompts", "2", "--max-tokens", "8", "--num-repeats", "1", "--k", "2")
    options = ("--shape", "tiny-moe", "--device", "cpu", "--dtype", "float32", *sizes)
    run_here(*options, "--stage", "pair", "--stage", "determinism", "--report", str(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == []
    results = report["shapes"]["tiny-moe"]
    assert sorted(results) == ["checkpoint", "determinism", "pair float32"]
    assert [entry["num_equal"] for entry in results["pair float32"]["agreements"]] == [2, 2, 2, 2]
    assert [(time["width"], time["on_equal"]) for time in results["determinism"]["times"]] == [
        *[(1, 1), (3, 3)] * 2,
        (40, 40),
    ]


def test_sampling_on_a_cpu_needs_no_model_and_gives_every_figure(tmp_path: Path) -> None:
    """As users run it: the stage is a process."""
    options = ("--stage", "sampling", "--shape", "tiny", "--device", "cpu")
    result = run_script(*options, "--report", str(tmp_path))
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["failures"], report["shapes"]) == ([], {})
    sampling = report["sampling"]
    assert (sampling["kernels"], sampling["differing"]) == ("Kernels", [])
    kinds = {(time["kind"], time["num_rows"]) for time in sampling["times"]}
    assert kinds == {("verify", 3), ("verify", 6), ("draw", 1), ("draw", 2)}
    assert len(sampling["kernel_times"]) == 2 * 7
    assert "Tokens equal a CPU's in 7 of 7 kinds." in (tmp_path / "report.md").read_text()


def test_attention_and_proposals_on_a_cpu_give_every_figure(
    tmp_path: Path, run_here: Callable[..., None]
) -> None:
    names = ("attention", "experts", "recurrent", "proposals")
    stages = [part for name in names for part in ("--stage", name)]
    run_here(*stages, "--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--report", str(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["failures"], report["shapes"]) == ([], {})
    attention = report["attention"]
    assert attention["kernels"]["gather"] == "equal" and "triton" in attention["kernels"]
    measured = {(time["num_sequences"], time["num_rows"], time["is_tree"]) for time in attention["times"]}
    assert measured == {(n, *rows) for n in (1, 2) for rows in ((1, False), (3, False), (7, True))}
    experts = report["experts"]["times"]
    assert [(time["format"], time["num_rows"]) for time in experts] == [("float32", 1), ("float32", 3)]
    # Two are chosen for each row; rows share some of them by chance.
    assert experts[0]["num_hit"] == 2.0 and 2.0 <= experts[1]["num_hit"] <= 6.0
    recurrent = report["recurrent"]["times"]
    assert [(time["kind"], time["num_sequences"], time["num_rows"]) for time in recurrent] == [
        ("step", 1, 1),
        ("step", 2, 3),
        ("prompt", 1, 70),
    ]
    assert [time["share"] is None for time in recurrent] == [False, False, True]
    captures = report["proposals"]["captures"]
    assert captures["num_captured"] == captures["num_shapes"] == 6 * 8 + 3 * 6 * 2
    proposals = report["proposals"]["times"]
    assert [(time["sampling"], time["num_sequences"]) for time in proposals] == [
        (name, count) for name in ("greedy", "coupled", "top-p 0.9", "rejection") for count in (1, 2)
    ]
    assert [time["num_equal"] for time in proposals] == [3, 6] * 4
    text = (tmp_path / "report.md").read_text()
    assert "84 of 84 shapes captured in" in text
    assert "| gather | 2 | 7 | 40 | True |" in text and "| rejection | 2 | 2 |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_message_says_so_and_the_report_has_it(tmp_path: Path) -> None:
    report = tmp_path / "new" / "folder"
    # One stage: each is a process that imports torch before it can tell.
    result = run_script("--shape", "tiny", "--stage", "sampling", "--report", str(report))
    assert result.returncode == 1
    expected = "--device is 'cuda', but torch sees no CUDA device; allowed here: cpu"
    assert expected in result.stderr
    assert expected in (report / "report.md").read_text()
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sampling", {"is_tiny": True}),
        ("attention", {"is_tiny": True}),
        ("products", {"is_tiny": True}),
        ("experts", {"is_tiny": True}),
        ("recurrent", {"is_tiny": True}),
        ("proposals", {"path": EMBEDDED, "dtype": "float32", "is_tiny": True}),
        ("models", {"size": "tiny", "directory": "unused"}),
    ],
)
def test_every_stage_that_comes_first_asks_for_the_device(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--device is 'cuda', but torch sees no CUDA device"):
        stage.run_stage(name, {"device": "cuda", **arguments})


def test_a_stage_that_takes_too_long_is_ended_and_the_report_is_written(tmp_path: Path) -> None:
    result = run_script(
        "--shape", "tiny", "--device", "cpu", "--stage-timeout", "0.1", "--report", str(tmp_path)
    )
    assert result.returncode == 1
    assert json.loads((tmp_path / "report.json").read_text())["failures"] == [
        {"stage": stage, "reason": "it took more than 0.1 s"}
        for stage in (
            "sampling: sampling",
            "attention: attention",
            "products: products",
            "experts: experts",
            "recurrent: recurrent",
            "proposals: proposals",
            "tiny checkpoint: models",
        )
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-prompts", "0"], "should be greater than or equal to 1"),
        (["--k", "33"], "should be less than or equal to 32"),
        (["--stage-timeout", "nan"], "--stage-timeout is nan; allowed: more than 0"),
        (["--shape", "70b"], "'70b' is not one of"),
    ],
)
def test_wrong_option_is_refused_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "gpu", *arguments, "--report", "x"]) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_default_options_measure_everything_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[runs.GpuPlan] = []

    def measure(plan: runs.GpuPlan) -> list[str]:
        plans.append(plan)
        return []

    monkeypatch.setattr(runs, "measure_gpu", measure)
    assert run(["bench", "gpu", "--report", "x"]) == 0
    (plan,) = plans
    first = ("sampling", "attention", "products", "experts", "recurrent")
    later = ("proposals", "forwards", "determinism", "pair", "transformers")
    assert plan.stages == (*first, *later)
    assert (plan.shapes, plan.device, plan.draft_device) == (("1b", "8b"), "cuda", "cuda")


def test_divergence_counts_tokens_up_to_the_first_difference() -> None:
    outputs = {
        ("off", 0.0, 0): (1, 2, 3, 4),
        ("off", 0.0, 1): (1, 2, 3, 4),
        ("serial K=2", 0.0, 0): (1, 2, 3, 4),
        ("serial K=2", 0.0, 1): (1, 9, 3, 4),
    }
    agreement = compare(outputs, "serial K=2", 0.0, 2)
    assert agreement == OutputAgreement("serial K=2", 0.0, 2, 1, 6, 1)
    assert agreement.divergence_rate == 1 / 6


def test_shorter_output_differs_where_it_ends() -> None:
    assert num_compared((1, 2), (1, 2, 3)) == 3
    assert num_compared((), ()) == 0


def test_arms_are_plain_then_serial_then_overlapped() -> None:
    drafted = [f"{overlap} K={k}" for overlap in ("serial", "enumerate") for k in (2, 4)]
    assert [arm.name for arm in arms_of((2, 4), with_auto=True)] == ["off", *drafted, "auto K=auto"]


def report_of(num_equal: int, ours: list[int], theirs: list[int]) -> dict[str, Any]:
    entry = {"arm": "serial K=2", "temperature": 0.0, "num_outputs": 1, "num_equal": num_equal}
    pair = {"arms": [], "agreements": [{**entry, "divergence_rate": 0.0}], "greedy": [ours]}
    results = {"pair float32": pair, "transformers float32": {"arms": [], "greedy": [theirs]}}
    return {"options": {}, "shapes": {"1b": results}, "failures": []}


def test_float32_outputs_that_differ_are_problems_and_bfloat16_ones_are_not() -> None:
    assert problems(report_of(1, [1, 2], [1, 2])) == []
    assert problems(report_of(0, [1, 2], [1, 2])) == [
        "1b, float32, temperature 0: serial K=2 gives 0 of 1 outputs of plain decoding"
    ]
    differing = report_of(1, [1, 2], [1, 3])
    assert problems(differing) == ["1b, float32: 0 of 1 greedy outputs equal transformers'"]
    renamed = deepcopy(differing)
    renamed["shapes"]["1b"] = {
        key.replace("float32", "bfloat16"): value for key, value in differing["shapes"]["1b"].items()
    }
    assert problems(renamed) == []


def test_summary_compares_with_the_bound_with_plain_and_with_transformers(tmp_path: Path) -> None:
    def arm(name: str, temperature: float, speed: float) -> dict[str, Any]:
        rates = dict.fromkeys(("acceptance_rate", "hit_rate", "verify_ms", "draft_ms"))
        plans = {"serial K=4 profitable": 0.75, "off K=0 prefill": 0.25}
        return {"arm": name, "temperature": temperature, "tokens_per_s": speed, "plans": plans, **rates}

    speeds = {"off": 50, "serial K=2": 80, "serial K=4": 100, "enumerate K=2": 120, "auto K=auto": 110}
    arms = [arm(name, 0, speed) for name, speed in speeds.items()]
    pair = {"arms": [*arms, arm("off", 1, 900)], "agreements": [], "greedy": []}
    forwards = {
        **dict.fromkeys(("weight_bytes", "weights_gb_per_s", "copy_gb_per_s"), 1.0),
        "block_size": 16,
        "default_attention": "triton",
        "attentions": {},
        "times": [
            {
                "attention": "triton",
                "is_captured": True,
                "num_sequences": 1,
                "width": 1,
                "forward_ms": 12.5,
                "bound_ms": 10.0,
                "share": 0.8,
            }
        ],
        "verifies": [
            {
                "sampling": "coupled",
                "num_sequences": 32,
                "forward_ms": 10.0,
                "verify_ms": 10.5,
                "added_share": 0.05,
                "vocab_size": 300,
                "num_drafts": 4,
            }
        ],
    }
    peer = {"arms": [{"arm": "generate", "tokens_per_s": 40}], "greedy": []}
    results = {"forwards": forwards, "pair bfloat16": pair, "transformers bfloat16": peer}
    write_report({"options": {"dtype": "bfloat16"}, "shapes": {"1b": results}, "failures": []}, tmp_path)
    assert [line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("- ")] == [
        "- Plain decoding over gRPC: 50.0 tokens/s, 0.50 of the 100.0 that the linear layers alone allow",
        "- serial K=4: 100.0 tokens/s, 2.00 times plain",
        "- enumerate K=2: 120.0 tokens/s, 2.40 times plain",
        "- auto K=auto: 110.0 tokens/s, 2.20 times plain",
        "- transformers, generate: 40.0 tokens/s; specray's best is 3.00 times that",
    ]
    text = (tmp_path / "report.md").read_text()
    assert "verdicts over a vocabulary of 300 add to a forward with 4 draft tokens" in text
    assert "| coupled | 32 | 10.000 | 10.500 | 0.050 |" in text
    expected = "Plans of auto K=auto at temperature 0: serial K=4 profitable 75%, off K=0 prefill 25%."
    assert expected in text.splitlines()


def test_other_tokens_than_a_cpus_are_a_problem() -> None:
    report = {**report_of(1, [1, 2], [1, 2]), "sampling": {"differing": ["top-p 0.9"]}}
    assert problems(report) == ["sampling, top-p 0.9: other tokens than a CPU's"]


def test_kernels_and_loops_that_are_wrong_are_problems() -> None:
    time = {"sampling": "greedy", "num_sequences": 1, "num_tokens": 4, "num_equal": 11, "num_proposals": 12}
    kernels = {
        "gather": "equal",
        "varlen": "attention is 'varlen', which does not work here: ImportError: none",
        "triton": "attention is 'triton', which does not work here: its numbers are off by 0.1; allowed: 0",
    }
    report = {"shapes": {}, "failures": [], "attention": {"kernels": kernels}, "proposals": {"times": [time]}}
    wrong_kernel = f"attention, triton: {kernels['triton']}"
    assert problems({**report, "options": {"dtype": "bfloat16"}}) == [wrong_kernel]
    assert problems({**report, "options": {"dtype": "float32"}}) == [
        wrong_kernel,
        "proposals, greedy, 1 sequences, 4 draft tokens: 11 of 12 of the loop equal those of steps",
    ]


@pytest.mark.slow
def test_products_in_the_interpreter_give_every_figure(tmp_path: Path) -> None:
    """In a process of its own: whether kernels are interpreted is decided when triton is imported."""
    pytest.importorskip("triton", minversion="3.9")
    options = ("--stage", "products", "--shape", "tiny", "--device", "cpu", "--report", str(tmp_path))
    result = run_script(*options, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr
    products = json.loads((tmp_path / "report.json").read_text())["products"]
    assert len(products["formats"]) == 16 and set(products["formats"].values()) == {"equal"}
    assert len(products["times"]) == 2 * 17
    assert "| nvfp4 | 64 x 256 | 17 |" in (tmp_path / "report.md").read_text()


def test_bits_that_differ_with_the_setting_on_are_a_problem() -> None:
    times = [{"num_sequences": 4, "width": 5, "on_equal": equal, "off_equal": 0} for equal in (5, 3)]
    report = {"options": {}, "shapes": {"8b": {"determinism": {"times": times}}}, "failures": []}
    assert problems(report) == [
        "8b, deterministic, 4 sequences: 3 of 5 rows have the bits of rows that come one by one"
    ]


def test_report_of_a_run_whose_stages_all_failed_is_written(tmp_path: Path) -> None:
    failure = {"stage": "1b checkpoint: models", "reason": "it ended:\nno room"}
    write_report({"options": {}, "shapes": {"1b": {}}, "failures": [failure]}, tmp_path)
    assert "- 1b checkpoint: models: no room" in (tmp_path / "report.md").read_text()
