"""Measures specray and its peers over the same prompts, in turns: A B C, A B C, ...

Each turn starts an arm's server, warms it up, measures every temperature and concurrency, and stops it. Only
one server runs at a time: an idle vLLM with a 200M model took a tenth of a core and 6.5 GB, so all servers at
once would disturb the measured one and not fit into a small machine.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

from specray.bench.compare.journal import Journal, PassRow
from specray.bench.compare.peers import PeerArm, Setup, System, running
from specray.bench.compare.peers.process import free_port
from specray.bench.core.figures import Percentiles
from specray.bench.load.client import ServerClient
from specray.bench.load.prompts import Prompt
from specray.bench.load.run import MAX_KEPT_ERRORS, run_pass
from specray.bench.load.stats import summarize
from specray.bench.methods.prompts import tokenized
from specray.errors import ConfigError, SpecrayError
from specray.tokenization import Tokenizer, load_tokenizer

WARMUP_BURST_TOKENS = 16
WARMUP_LABEL = "warm-up"
"""Label of the prompts before the first pass."""


@dataclass(frozen=True, slots=True)
class ComparePlan:
    """The arms, prompts and loads of a comparison."""

    arms: tuple[PeerArm, ...]
    prompts: Sequence[str]
    """Prompts; at least as many as the highest concurrency."""
    concurrencies: tuple[int, ...] = (1, 4, 8, 16, 32)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    num_turns: int = 2
    num_prompts: int = 4
    """Requests per pass; at least the pass's concurrency are sent."""
    max_tokens: int = 128
    num_warmup: int = 2
    """Uncounted requests after each start, one at a time; a short burst follows them."""
    has_fresh_prompts: bool = True
    """True: no prompt comes twice to a server. False: every pass repeats them, so that prefix caches know
    them."""
    is_chat: bool = False
    """Prompts are asked in the target's chat template, where it has one."""
    start_timeout_s: float = 600.0
    request_timeout_s: float = 600.0

    def cells(self, system: System) -> list[tuple[float, int]]:
        """Returns (temperature, concurrency) of the passes in one turn of this system."""
        limit = system.max_concurrency
        return [
            (temperature, concurrency)
            for temperature in self.temperatures
            for concurrency in self.concurrencies
            if limit is None or concurrency <= limit
        ]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run."""

    is_complete: bool
    failed: Mapping[str, str]
    """Reasons why arms could not be measured, by arm."""


async def compare(
    plan: ComparePlan,
    systems: Mapping[str, System],
    setup: Setup,
    journal: Journal,
    *,
    on_progress: Callable[[str], None] = lambda text: None,
    time_limit_s: float = float("inf"),
) -> Progress:
    """Measures the passes that are not in the journal yet.

    Args:
        systems: systems of the plan's arms by name, all installed.
        on_progress: called with a line of text.
        time_limit_s: seconds after which no server is started any more; the next run goes on from there.

    Raises:
        ConfigError: a prompt with its output is longer than a sequence may be.
    """
    ends_at_s = time.monotonic() + time_limit_s
    tokenizer = load_tokenizer(setup.target)
    _check_lengths(plan, tokenizer, setup.max_model_len)
    failed: dict[str, str] = {}
    for turn in range(plan.num_turns):
        for arm in plan.arms:
            missing = [
                cell for cell in plan.cells(systems[arm.system]) if not journal.has(turn, arm.name, *cell)
            ]
            if not missing or arm.name in failed:
                continue
            if time.monotonic() >= ends_at_s:
                return Progress(False, failed)
            on_progress(f"turn {turn + 1} of {plan.num_turns}: {arm.name}")
            try:
                await _run_turn(plan, systems[arm.system], arm, setup, tokenizer, journal, turn, missing)
            except SpecrayError as error:
                failed[arm.name] = str(error)
                on_progress(f"{arm.name} was not measured: {error}")
    return Progress(True, failed)


def _check_lengths(plan: ComparePlan, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Refuses prompts that no server would take, before one is started."""
    count = max(*plan.concurrencies, plan.num_prompts, plan.num_warmup)
    pairs = product(plan.temperatures, plan.concurrencies)
    labels = (WARMUP_LABEL, *(_label(temperature, concurrency) for temperature, concurrency in pairs))
    prompts = chain.from_iterable(cell_prompts(plan, tokenizer, label, count) for label in labels)
    longest = max(map(len, prompts)) + plan.max_tokens
    if longest > max_model_len:
        raise ConfigError(
            f"--max-model-len is {max_model_len}; allowed: {longest} or more, "
            "the longest prompt with its output"
        )


async def _run_turn(
    plan: ComparePlan,
    system: System,
    arm: PeerArm,
    setup: Setup,
    tokenizer: Tokenizer,
    journal: Journal,
    turn: int,
    cells: Sequence[tuple[float, int]],
) -> None:
    launch = system.launch(arm, setup, free_port())
    log_path = setup.work_dir / f"{arm.name.replace(' ', '-')}.log"
    async with (
        running(launch, log_path, start_timeout_s=plan.start_timeout_s) as url,
        # llama.cpp's server closes a connection after a stream without saying so.
        ServerClient(url, timeout_s=plan.request_timeout_s, keep_alive=False) as client,
    ):
        fields = {"model": await client.model(), "ignore_eos": True, "max_tokens": plan.max_tokens}
        await _warm_up(client, plan, fields, tokenizer, system)
        for temperature, concurrency in cells:
            prompts = cell_prompts(plan, tokenizer, _label(temperature, concurrency), concurrency)
            sampling = {"temperature": temperature, **system.request_fields(temperature)}
            bodies = [{**fields, **sampling, "prompt": prompt} for prompt in prompts]
            journal.add(await _measure(client, plan, arm, bodies, (turn, temperature, concurrency)))


async def _warm_up(
    client: ServerClient, plan: ComparePlan, fields: dict[str, Any], tokenizer: Tokenizer, system: System
) -> None:
    """Warms up at the first temperature; a server that cannot answer fails here. Raises SpecrayError."""
    temperature = plan.temperatures[0]
    body = {**fields, "temperature": temperature, **system.request_fields(temperature)}
    most = max(concurrency for _, concurrency in plan.cells(system))
    prompts = cell_prompts(plan, tokenizer, WARMUP_LABEL, max(most, plan.num_warmup))
    single = await run_pass(
        client, [{**body, "prompt": prompt} for prompt in prompts[: plan.num_warmup]], concurrency=1
    )
    burst = [{**body, "prompt": prompt, "max_tokens": WARMUP_BURST_TOKENS} for prompt in prompts[:most]]
    together = await run_pass(client, burst, concurrency=most)
    for error in (*single.errors, *together.errors):
        raise SpecrayError(f"the warm-up failed: {error}")


def _label(temperature: float, concurrency: int) -> str:
    return f"{temperature:g} {concurrency}"


def cell_prompts(plan: ComparePlan, tokenizer: Tokenizer, label: str, concurrency: int) -> list[list[int]]:
    """The prompts of a pass as token ids, so that every system reads the same.

    Fresh ones begin with a comment line that no other pass of the same server has: prompts that a prefix
    cache knew from an earlier pass would hide what a prompt costs.
    """
    count = max(plan.num_prompts, concurrency)
    first_line = f"# {label}\n" if plan.has_fresh_prompts else ""
    prompts = [Prompt(first_line + prompt) for prompt in plan.prompts[:count]]
    return [list(one.token_ids) for one in tokenized(tokenizer, prompts, is_chat=plan.is_chat)]


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


def checkpoint_digest(checkpoint: Path) -> str:
    """Tells checkpoints apart without reading them whole: names, sizes and the ends of the weight files.

    Args:
        checkpoint: a directory, or its only file.
    """
    digest = hashlib.sha256()
    for path in [checkpoint] if checkpoint.is_file() else sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            file.seek(max(0, size - _DIGEST_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:12]


_DIGEST_BYTES = 1 << 20
