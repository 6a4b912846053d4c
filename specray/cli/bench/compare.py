"""``specray bench compare``: specray and other inference servers over the same prompts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli import options
from specray.cli.ending import run_until_told
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.bench.compare.peers import Setup, System
    from specray.bench.compare.run import ComparePlan

DEFAULT_ARMS = (
    *("specray:plain", "specray:serial", "specray:auto"),
    *("transformers:plain", "transformers:draft:4", "transformers:ngram:4"),
    *("vllm:plain", "vllm:draft:4", "vllm:draft:8", "vllm:ngram:4"),
    *("llama.cpp:plain", "llama.cpp:draft:4", "llama.cpp:draft:8", "llama.cpp:ngram:4"),
)
_ARM_HELP = (
    f"SYSTEM:MODE[:K][@WEIGHTS]; may be repeated. Default: {', '.join(DEFAULT_ARMS)}. More: specray:ahead, "
    "specray:enumerate, specray:ngram, specray:suffix, vllm:draft-probabilistic. Weights: bfloat16 if none, "
    "int8 and int4 of specray, gguf of llama.cpp (--gguf)."
)


Out = Annotated[Path, typer.Option(help="Directory for the report; a run that is there is continued.")]
Checkpoint = Annotated[str, typer.Option(help="Checkpoint directory, or embedded.")]
VllmPython = Annotated[Path | None, typer.Option(help="Python interpreter of an environment with vLLM.")]
LlamaCppSource = Annotated[
    Path | None, typer.Option(help="Source directory of llama.cpp, which is built in its build/.")
]
Gguf = Annotated[Path | None, typer.Option(help="GGUF file of the target, for llama.cpp:MODE@gguf.")]
IsChat = Annotated[
    bool, typer.Option(help="Ask in the target's chat template, where it has one, or for a continuation.")
]
Arms = Annotated[list[str] | None, typer.Option(help=_ARM_HELP)]
Concurrencies = Annotated[
    list[int] | None, typer.Option(min=1, help="Requests at a time; may be repeated. Default: 1 4 8 16 32.")
]
Temperatures = Annotated[
    list[float] | None,
    typer.Option(min=0, max=2, help="Sampling temperature; may be repeated. Default: 0 0.7 1."),
]
Turns = Annotated[int, typer.Option(min=1, help="Passes per arm, in turns.")]
Prompts = Annotated[int, typer.Option(min=1, help="Minimum requests per pass.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Output tokens per prompt.")]
Warmup = Annotated[int, typer.Option(min=1, help="Requests after each start that are not counted.")]
FreshPrompts = Annotated[
    bool, typer.Option(help="Send no prompt to a server twice, so that no prefix cache knows it.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of every target; default: all cores.")]
MaxModelLen = Annotated[int, typer.Option(min=32, help="Maximum tokens of a sequence.")]
StartTimeout = Annotated[float, typer.Option(min=1, help="Seconds allowed for the start of a server.")]
TimeLimit = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds after which no server is started any more; run again to go on."),
]


def compare(
    out: Out,
    target: Checkpoint = "embedded",
    draft: Checkpoint = "embedded",
    vllm_python: VllmPython = None,
    llama_cpp: LlamaCppSource = None,
    gguf: Gguf = None,
    arm: Arms = None,
    dataset: options.PromptSource = Dataset.BUILTIN,
    dataset_path: options.PromptPath = None,
    chat: IsChat = False,
    concurrency: Concurrencies = None,
    temperature: Temperatures = None,
    num_turns: Turns = 2,
    num_prompts: Prompts = 4,
    max_tokens: MaxTokens = 128,
    num_warmup: Warmup = 2,
    fresh_prompts: FreshPrompts = True,
    num_threads: Threads = None,
    max_model_len: MaxModelLen = 1024,
    start_timeout_s: StartTimeout = 600.0,
    timeout_s: options.RequestTimeout = 600.0,
    time_limit_s: TimeLimit = None,
) -> None:
    """Compare specray with the other inference servers that are installed, over the same prompts.

    In every turn the server of each arm is started, measured and stopped, one after another.
    """
    from specray.bench.compare.peers import Setup, parse_arm
    from specray.bench.compare.run import ComparePlan
    from specray.bench.load.prompts import load_prompts

    systems = _systems(vllm_python, llama_cpp, gguf)
    concurrencies = tuple(sorted(set(concurrency or (1, 4, 8, 16, 32))))
    plan = ComparePlan(
        arms=tuple(dict.fromkeys(parse_arm(text, systems) for text in arm or DEFAULT_ARMS)),
        prompts=load_prompts(dataset, dataset_path, max(num_prompts, num_warmup, *concurrencies)),
        concurrencies=concurrencies,
        temperatures=tuple(sorted(set(temperature or (0.0, 0.7, 1.0)))),
        num_turns=num_turns,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        num_warmup=num_warmup,
        has_fresh_prompts=fresh_prompts,
        is_chat=chat,
        start_timeout_s=start_timeout_s,
        request_timeout_s=timeout_s,
    )
    setup = Setup(
        target=_checkpoint(target, "--target"),
        draft=_checkpoint(draft, "--draft"),
        num_threads=num_threads or os.cpu_count() or 1,
        max_model_len=max_model_len,
        max_num_seqs=max(concurrencies),
        work_dir=out,
    )
    conditions = _conditions(plan, setup, dataset, gguf)
    raise typer.Exit(_run_and_report(plan, systems, setup, conditions, time_limit_s))


def _systems(vllm_python: Path | None, llama_cpp: Path | None, gguf: Path | None) -> dict[str, System]:
    from specray.bench.compare.peers.llama_cpp import LlamaCpp
    from specray.bench.compare.peers.own import Specray
    from specray.bench.compare.peers.transformers import Transformers
    from specray.bench.compare.peers.vllm import Vllm

    systems: Sequence[System] = (Specray(), Transformers(), Vllm(vllm_python), LlamaCpp(llama_cpp, gguf))
    return {system.name: system for system in systems}


def _checkpoint(name: str, option: str) -> Path:
    """Finds the checkpoint's directory. A hub id is refused: the other servers read the files themselves.

    Raises:
        ConfigError: the directory has no config.json.
    """
    from specray.config import EMBEDDED
    from specray.demo.paths import demo_draft_path, demo_target_path

    if name == EMBEDDED:
        return demo_target_path() if option == "--target" else demo_draft_path()
    path = Path(name).absolute()
    if not (path / "config.json").is_file():
        raise ConfigError(f"{option} {name}: there is no config.json; allowed: a checkpoint's directory")
    return path


def _conditions(plan: ComparePlan, setup: Setup, dataset: Dataset, gguf: Path | None) -> dict[str, object]:
    """Collects what all passes of a run have in common, for the journal and the report."""
    from specray.bench.compare.run import checkpoint_digest

    return {
        "target": f"{setup.target.name} {checkpoint_digest(setup.target)}",
        "draft": f"{setup.draft.name} {checkpoint_digest(setup.draft)}",
        **({} if gguf is None else {"GGUF file": f"{gguf.name} {checkpoint_digest(gguf)}"}),
        "dtype": "bfloat16",
        "cores": os.cpu_count(),
        "threads": setup.num_threads,
        "prompts": ", ".join(
            [
                dataset.value,
                *(["chats"] if plan.is_chat else []),
                "new ones in every pass" if plan.has_fresh_prompts else "repeated",
            ]
        ),
        "least requests of a pass": plan.num_prompts,
        "new tokens per prompt": plan.max_tokens,
        "most tokens of a sequence": setup.max_model_len,
        "most requests at a time": setup.max_num_seqs,
    }


def _run_and_report(
    plan: ComparePlan,
    systems: dict[str, System],
    setup: Setup,
    conditions: dict[str, object],
    time_limit_s: float | None,
) -> int:
    """Measures the arms whose systems are installed; returns the exit code."""
    from rich.console import Console

    from specray.bench.compare.journal import Journal
    from specray.bench.compare.report import Report, markdown, write_report
    from specray.bench.compare.run import compare as measure
    from specray.cli.output import make_directory

    out, console = setup.work_dir, Console(stderr=True)
    wanted = dict.fromkeys(arm.system for arm in plan.arms)
    absent = {name: reason for name in wanted if (reason := systems[name].absence()) is not None}
    make_directory(out, "--out")
    journal = Journal(out / "passes.jsonl", conditions)
    for name in wanted:
        if name not in absent:
            systems[name].prepare(setup, [arm for arm in plan.arms if arm.system == name])
    plan = replace(plan, arms=tuple(arm for arm in plan.arms if arm.system not in absent))
    limit_s = float("inf") if time_limit_s is None else time_limit_s
    outcome = run_until_told(
        measure(plan, systems, setup, journal, on_progress=console.print, time_limit_s=limit_s)
    )
    report = Report("specray and its peers", journal.conditions, journal.rows, absent, outcome.failed)
    write_report(report, out)
    print(markdown(report))
    if not outcome.is_complete:
        console.print("the time limit is over: run the same command again to go on")
    return 1 if outcome.failed else 0
