"""Measures specray and its peers over the same prompts, in turns: A B C, A B C, ...

Each turn starts an arm's server, warms it up, measures every temperature and concurrency, and stops it. Only
one server runs at a time: an idle vLLM with a 200M model took a tenth of a core and 6.5 GB, so all servers at
once would disturb the measured one and not fit into a small machine.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from specray.bench.compare.journal import Journal, PassRow
from specray.bench.compare.peers import PeerArm, Setup, System, parse_arm, running
from specray.bench.compare.peers.base import stored_file
from specray.bench.compare.peers.llama_cpp import LlamaCpp
from specray.bench.compare.peers.own import Specray
from specray.bench.compare.peers.process import free_port
from specray.bench.compare.peers.transformers import Transformers
from specray.bench.compare.peers.vllm import Vllm
from specray.bench.compare.plan import COMPARE_ARMS, ComparePlan
from specray.bench.core.figures import Percentiles
from specray.bench.core.turns import in_turns
from specray.bench.load.client import ServerClient
from specray.bench.load.prompts import Prompt
from specray.bench.load.run import MAX_KEPT_ERRORS, run_pass
from specray.bench.load.stats import summarize
from specray.bench.methods.prompts import tokenized
from specray.config import EMBEDDED
from specray.demo.paths import demo_draft_path, demo_target_path
from specray.errors import ConfigError, SpecrayError
from specray.tokenization import Tokenizer, load_tokenizer

WARMUP_LABEL = "warm-up"
"""Label of the prompts before the first pass."""


@dataclass(frozen=True, slots=True)
class Run:
    """The systems and arms of a plan, as far as they are installed."""

    systems: Mapping[str, System]
    arms: Sequence[PeerArm]
    setup: Setup
    absent: Mapping[str, str]
    """Reasons why systems cannot be measured, by system."""

    def convert(self) -> None:
        """Makes what the systems need next to the checkpoints. Raises ConfigError."""
        for name in dict.fromkeys(arm.system for arm in self.arms):
            self.systems[name].prepare(self.setup, [arm for arm in self.arms if arm.system == name])


def systems_of(plan: ComparePlan) -> dict[str, System]:
    """All systems that can be compared, by name."""
    systems: Sequence[System] = (
        Specray(),
        Transformers(),
        Vllm(plan.vllm_python),
        LlamaCpp(plan.llama_cpp, plan.gguf or stored_file(Path(plan.target).absolute())),
    )
    return {system.name: system for system in systems}


def prepared(plan: ComparePlan, systems: Mapping[str, System], work_dir: Path) -> Run:
    """What a plan comes to on this machine. Raises ConfigError."""
    arms = dict.fromkeys(parse_arm(text, systems) for text in plan.arm or COMPARE_ARMS)
    names = dict.fromkeys(arm.system for arm in arms)
    absent = {name: reason for name in names if (reason := systems[name].absence()) is not None}
    setup = Setup(
        target=_checkpoint(plan.target, "--target"),
        draft=_checkpoint(plan.draft, "--draft"),
        num_threads=plan.num_threads,
        max_model_len=plan.max_model_len,
        max_num_seqs=max(plan.concurrencies),
        work_dir=work_dir,
    )
    return Run(systems, [arm for arm in arms if arm.system not in absent], setup, absent)


def _checkpoint(name: str, option: str) -> Path:
    """Finds the checkpoint's directory. A hub id is refused: the other servers read the files themselves.

    Raises:
        ConfigError: the directory has no config.json.
    """
    if name == EMBEDDED:
        return demo_target_path() if option == "--target" else demo_draft_path()
    path = Path(name).absolute()
    if not (path / "config.json").is_file():
        raise ConfigError(f"{option} {name}: there is no config.json; allowed: a checkpoint's directory")
    return path


def conditions_of(plan: ComparePlan, setup: Setup) -> dict[str, object]:
    """Collects what all passes of a run have in common, for the journal and the report."""
    parts = [plan.dataset.value, *(["chats"] if plan.chat else [])]
    files = {"target": setup.target, "draft": setup.draft, **({"GGUF file": plan.gguf} if plan.gguf else {})}
    return {
        **{name: f"{path.name} {checkpoint_digest(path)}" for name, path in files.items()},
        "dtype": "bfloat16",
        "cores": os.cpu_count(),
        "threads": setup.num_threads,
        "prompts": ", ".join([*parts, "new ones in every pass" if plan.fresh_prompts else "repeated"]),
        "least requests of a pass": plan.num_prompts,
        "new tokens per prompt": plan.max_tokens,
        "most tokens of a sequence": setup.max_model_len,
        "most requests at a time": setup.max_num_seqs,
    }


@dataclass(frozen=True, slots=True)
class Progress:
    is_complete: bool
    failed: Mapping[str, str]
    """Reasons why arms could not be measured, by arm."""


def cells_of(plan: ComparePlan, system: System) -> list[tuple[float, int]]:
    limit = system.max_concurrency or max(plan.concurrencies)
    return [cell for cell in product(plan.temperatures, plan.concurrencies) if cell[1] <= limit]


async def compare(
    plan: ComparePlan,
    run: Run,
    prompts: Sequence[str],
    journal: Journal,
    *,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Progress:
    """Measures the passes that are not in the journal yet.

    Args:
        prompts: at least as many as the highest concurrency.
        on_progress: called with a line of text.

    Raises:
        ConfigError: a prompt with its output is longer than a sequence may be.
    """
    ends_at_s = time.monotonic() + plan.time_limit_s
    asked = AskedPrompts(plan, prompts, load_tokenizer(run.setup.target))
    asked.check_lengths()
    failed: dict[str, str] = {}
    for number, _, arm in in_turns(run.arms, plan.num_turns):
        system = run.systems[arm.system]
        missing = [cell for cell in cells_of(plan, system) if not journal.has(number, arm.name, *cell)]
        if not missing or arm.name in failed:
            continue
        if time.monotonic() >= ends_at_s:
            return Progress(False, failed)
        on_progress(f"turn {number + 1} of {plan.num_turns}: {arm.name}")
        try:
            await _run_turn(plan, system, arm, run.setup, asked, journal, number, missing)
        except SpecrayError as error:
            failed[arm.name] = str(error)
            on_progress(f"{arm.name} was not measured: {error}")
    return Progress(True, failed)


class AskedPrompts:
    """The prompts of each pass as token ids, so that every system reads the same.

    Fresh ones begin with a comment line that no other pass of the same server has: prompts that a prefix
    cache knew from an earlier pass would hide what a prompt costs.
    """

    def __init__(self, plan: ComparePlan, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self._plan, self._texts, self._tokenizer = plan, texts, tokenizer

    def of(self, label: str, concurrency: int) -> list[list[int]]:
        count = max(self._plan.num_prompts, concurrency)
        first_line = f"# {label}\n" if self._plan.fresh_prompts else ""
        prompts = [Prompt(first_line + text) for text in self._texts[:count]]
        return [list(one.token_ids) for one in tokenized(self._tokenizer, prompts, is_chat=self._plan.chat)]

    def check_lengths(self) -> None:
        """Refuses prompts that no server would take, before one is started."""
        plan = self._plan
        count = max(*plan.concurrencies, plan.num_prompts, plan.num_warmup)
        labels = [WARMUP_LABEL, *(_label(*cell) for cell in product(plan.temperatures, plan.concurrencies))]
        longest = max(len(prompt) for label in labels for prompt in self.of(label, count)) + plan.max_tokens
        if longest > plan.max_model_len:
            raise ConfigError(
                f"--max-model-len is {plan.max_model_len}; allowed: {longest} or more, "
                "the longest prompt with its output"
            )


async def _run_turn(
    plan: ComparePlan,
    system: System,
    arm: PeerArm,
    setup: Setup,
    prompts: AskedPrompts,
    journal: Journal,
    turn: int,
    cells: Sequence[tuple[float, int]],
) -> None:
    launch = system.launch(arm, setup, free_port())
    log_path = setup.work_dir / f"{arm.name.replace(' ', '-')}.log"
    async with (
        running(launch, log_path, start_timeout_s=plan.start_timeout_s) as url,
        # llama.cpp's server closes a connection after a stream without saying so.
        ServerClient(url, timeout_s=plan.timeout_s, keep_alive=False) as client,
    ):
        fields = {"model": await client.model(), "ignore_eos": True, "max_tokens": plan.max_tokens}
        await _warm_up(client, plan, fields, prompts, system)
        for temperature, concurrency in cells:
            own = prompts.of(_label(temperature, concurrency), concurrency)
            sampling = {"temperature": temperature, **system.request_fields(temperature)}
            bodies = [{**fields, **sampling, "prompt": prompt} for prompt in own]
            journal.add(await _measure(client, plan, arm, bodies, (turn, temperature, concurrency)))


async def _warm_up(
    client: ServerClient, plan: ComparePlan, fields: dict[str, Any], asked: AskedPrompts, system: System
) -> None:
    """Warms up at the first temperature; a server that cannot answer fails here. Raises SpecrayError."""
    temperature = plan.temperatures[0]
    body = {**fields, "temperature": temperature, **system.request_fields(temperature)}
    most = max(concurrency for _, concurrency in cells_of(plan, system))
    prompts = asked.of(WARMUP_LABEL, max(most, plan.num_warmup))
    single = await run_pass(
        client, [{**body, "prompt": prompt} for prompt in prompts[: plan.num_warmup]], concurrency=1
    )
    burst = [{**body, "prompt": prompt, "max_tokens": 16} for prompt in prompts[:most]]
    together = await run_pass(client, burst, concurrency=most)
    for error in (*single.errors, *together.errors):
        raise SpecrayError(f"the warm-up failed: {error}")


def _label(temperature: float, concurrency: int) -> str:
    return f"{temperature:g} {concurrency}"


async def _measure(
    client: ServerClient,
    plan: ComparePlan,
    arm: PeerArm,
    bodies: Sequence[Mapping[str, Any]],
    key: tuple[int, float, int],
) -> PassRow:
    turn, temperature, concurrency = key
    result = await run_pass(client, bodies, concurrency=concurrency)
    summary = summarize(arm.name, [result.measured])
    return PassRow(
        turn=turn,
        system=arm.system,
        arm=arm.name,
        temperature=temperature,
        concurrency=concurrency,
        tokens_per_s=summary.tokens_per_s,
        ttft_ms=_mean(summary.ttft_ms),
        itl_ms=_mean(summary.itl_ms),
        tpot_ms=_mean(summary.tpot_ms),
        acceptance_rate=summary.acceptance_rate,
        mean_acceptance_length=summary.mean_acceptance_length,
        num_requests=summary.num_requests,
        num_failed=summary.num_failed,
        num_short=sum(record.num_output_tokens < plan.max_tokens for record in result.measured.records),
        errors=result.errors[:MAX_KEPT_ERRORS],
    )


def _mean(values: Percentiles | None) -> float | None:
    return None if values is None else values.mean


def _weight_files(checkpoint: Path) -> list[Path]:
    stored = stored_file(checkpoint)
    return sorted(checkpoint.glob("*.safetensors")) if stored is None else [stored]


def checkpoint_digest(checkpoint: Path) -> str:
    """Tells checkpoints apart without reading them whole: names, sizes and the ends of the weight files.

    Args:
        checkpoint: a directory, or its only file.
    """
    digest = hashlib.sha256()
    for path in [checkpoint] if checkpoint.is_file() else _weight_files(checkpoint):
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            file.seek(max(0, size - _DIGEST_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:12]


_DIGEST_BYTES = 1 << 20
