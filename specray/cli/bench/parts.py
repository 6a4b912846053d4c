"""``specray bench router``, ``rpc``, ``forwards``, ``adapters``, ``prefix``, ``drafting``, ``idle``."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from specray.cli import options
from specray.types import MAX_SPECULATIVE_TOKENS, Overlap


class Transport(StrEnum):
    UNIX = "unix"
    TCP = "tcp"


K = Annotated[int, typer.Option(min=0, max=MAX_SPECULATIVE_TOKENS, help="Draft tokens per round (K).")]
DraftedK = Annotated[int, typer.Option(min=1, max=MAX_SPECULATIVE_TOKENS, help="Draft tokens per round (K).")]
DraftTokensPerItem = Annotated[
    int, typer.Option(min=0, max=MAX_SPECULATIVE_TOKENS, help="Draft tokens per item of the batch.")
]
RouterMode = Annotated[
    Overlap, typer.Option("--overlap", help="What the draft does while the target verifies.")
]
Agreement = Annotated[float, typer.Option(min=0, max=1, help="Probability that a draft token is right.")]
TransportOption = Annotated[Transport, typer.Option(help="Connection between router and worker.")]
NewTokens = Annotated[list[int] | None, typer.Option(min=1, help="New tokens per sequence; may be repeated.")]
ContextLen = Annotated[int, typer.Option(min=0, help="Tokens of each sequence that are in the KV cache.")]
PromptLens = Annotated[
    list[int] | None,
    typer.Option(min=3, help="Tokens of the second turn's prompt; may be repeated. Default: 2000."),
]
NumRepeats = Annotated[int, typer.Option(min=1, help="Measurements per size.")]
NumSessions = Annotated[
    list[int] | None, typer.Option(min=1, help="Requests at a time; may be repeated. Default: 1 8 32.")
]
NumItems = Annotated[
    list[int] | None, typer.Option(min=1, help="Items per batch; may be repeated. Default: 1 8 32.")
]
NumTokens = Annotated[int, typer.Option(min=1, help="Output tokens per request.")]
NumRounds = Annotated[int, typer.Option(min=1, help="Round trips.")]
StepMs = Annotated[
    float | None,
    typer.Option(min=0, help="Measures plain decoding instead, by a target whose steps sleep so many ms."),
]


def router(
    mode: RouterMode = Overlap.ENUMERATE,
    num_speculative_tokens: K = 3,
    num_sessions: NumSessions = None,
    num_tokens: NumTokens = 1000,
    agreement: Agreement = 0.6,
    json_path: options.JsonPath = None,
) -> None:
    """Measure the router's own work per target step, with engines that cost nothing."""
    from specray.bench.router import measure_router
    from specray.cli.output import print_rows

    costs = [
        measure_router(
            overlap=mode,
            num_speculative_tokens=num_speculative_tokens,
            num_sessions=sessions,
            num_tokens=num_tokens,
            agreement=agreement,
        )
        for sessions in num_sessions or [1, 8, 32]
    ]
    print_rows("router", costs, json_path)


def rpc(
    transport: TransportOption = Transport.UNIX,
    num_sessions: NumItems = None,
    num_rounds: NumRounds = 2000,
    num_draft_tokens: DraftTokensPerItem = 4,
    step_ms: StepMs = None,
    json_path: options.JsonPath = None,
) -> None:
    """Measure a round trip to a worker whose engine answers at once, or plain decoding by one that sleeps."""
    from specray.bench.rpc import measure_decoding, measure_rpc
    from specray.cli.output import print_rows

    if step_ms is not None:
        decodings = [
            measure_decoding(step_ms=step_ms, num_sessions=sessions)
            for sessions in num_sessions or [1, 8, 32]
        ]
        print_rows("decoding", decodings, json_path)
        return
    trips = [
        measure_rpc(
            transport=transport.value,
            num_sessions=sessions,
            num_rounds=num_rounds,
            num_draft_tokens=num_draft_tokens,
        )
        for sessions in num_sessions or [1, 8, 32]
    ]
    print_rows("rpc", trips, json_path)


def forwards(
    model: options.Model = "embedded",
    role: options.Role = options.EngineRole.TARGET,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    num_threads: options.NumThreads = None,
    formats: options.WeightFormats = None,
    rows: NewTokens = None,
    num_sequences: options.NumSequences = None,
    context_len: ContextLen = 256,
    num_repeats: NumRepeats = 50,
    json_path: options.JsonPath = None,
) -> None:
    """Measure a model's forward against the least it can cost: reading its weights once.

    With several formats of weights, their forwards run in turns.
    """
    from rich.console import Console
    from rich.progress import track

    from specray.environment import apply_thread_environment

    apply_thread_environment()
    from specray.bench.forwards import ROWS, forwards_table, measure_in_turns
    from specray.bench.quantization import build_runners
    from specray.cli.bench.engines import engine_of
    from specray.cli.output import wide_console, write_json

    engine = engine_of(role, model=model, dtype=dtype, device=device, num_threads=num_threads)
    runners = build_runners(engine, formats or ["none"], role.value, num_sequences=max(num_sequences or [1]))
    sizes = [(sequences, width) for sequences in num_sequences or [1] for width in rows or ROWS]
    costs = [
        cost
        for sequences, width in track(sizes, "forwards", console=Console(stderr=True), transient=True)
        for cost in measure_in_turns(
            runners,
            rows=[width],
            num_sequences=sequences,
            context_len=context_len,
            num_repeats=num_repeats,
        )
    ]
    wide_console().print(forwards_table(costs, title=f"{role} {model}, {dtype}"))
    write_json([asdict(cost) for cost in costs], json_path)


def adapters(
    model: options.Model = "embedded",
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    num_threads: options.NumThreads = None,
    num_sequences: options.NumSequences = None,
    num_adapters: Annotated[
        list[int] | None, typer.Option(min=0, help="Different adapters in a step; may be repeated.")
    ] = None,
    rank: Annotated[int, typer.Option(min=1, max=512, help="Rank of the adapters.")] = 16,
    context_len: ContextLen = 256,
    num_repeats: NumRepeats = 50,
    json_path: options.JsonPath = None,
) -> None:
    """Measure what LoRA adapters cost a target's step, beside the same model without any, in turns."""
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from specray.environment import apply_thread_environment

    apply_thread_environment()
    from specray.bench.adapters import adapters_table, measure_adapters
    from specray.cli.bench.engines import engine_of
    from specray.cli.output import wide_console, write_json
    from specray.config import TargetConfig

    engine = engine_of(
        options.EngineRole.TARGET, model=model, dtype=dtype, device=device, num_threads=num_threads
    )
    assert isinstance(engine, TargetConfig), "of a target"
    with TemporaryDirectory(prefix="specray-adapters-") as directory:
        costs = measure_adapters(
            engine,
            Path(directory),
            num_rows=num_sequences or [1, 8],
            num_adapters=num_adapters or [0, 1, 4],
            rank=rank,
            context_len=context_len,
            num_repeats=num_repeats,
        )
    wide_console().print(adapters_table(costs, title=f"adapters of rank {rank}, target {model}, {dtype}"))
    write_json([asdict(cost) for cost in costs], json_path)


def prefix(
    model: options.Model = "embedded",
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    num_threads: options.NumThreads = None,
    prompt_len: PromptLens = None,
    answer_len: Annotated[int, typer.Option(min=1, help="Tokens of the answer before the message.")] = 64,
    message_len: Annotated[int, typer.Option(min=1, help="Tokens of the message.")] = 64,
    num_repeats: Annotated[int, typer.Option(min=1, help="Repetitions, each of other tokens.")] = 5,
    json_path: options.JsonPath = None,
) -> None:
    """Measure the first token of a chat's second turn, with a warm prefix cache and with a cold one."""
    from specray.environment import apply_thread_environment

    apply_thread_environment()
    from specray.bench.prefix import Turn, measure_turn, turns_table
    from specray.cli.output import wide_console, write_json
    from specray.cli.settings import build_config
    from specray.engine.build import build_target_engine

    lengths = prompt_len or [2000]
    values = {"model": model, "dtype": dtype, "device": device, "num_threads": num_threads, "profile_s": 0}
    values |= {"max_model_len": max(lengths) + 16, "max_num_seqs": 2}
    engine = build_target_engine(
        build_config(
            None, {f"target.{key}": value for key, value in values.items()} | {"draft.enabled": False}
        )
    )
    costs = [
        measure_turn(engine, Turn(length, answer_len, message_len), num_repeats=num_repeats, seed=length)
        for length in lengths
    ]
    wide_console().print(turns_table(costs, title=f"target {model}, {dtype}"))
    write_json([asdict(cost) for cost in costs], json_path)


def drafting(
    model: options.Model = "embedded",
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    num_threads: options.NumThreads = None,
    num_sequences: options.NumSequences = None,
    temperature: options.Temperatures = None,
    num_speculative_tokens: DraftedK = 4,
    context_len: Annotated[int, typer.Option(min=1, help="Tokens before the first round.")] = 256,
    num_repeats: Annotated[int, typer.Option(min=1, help="Rounds measured.")] = 50,
    json_path: options.JsonPath = None,
) -> None:
    """Measure what a draft token costs in a whole draft engine, without RPC."""
    from rich.console import Console

    from specray.environment import apply_thread_environment

    apply_thread_environment()
    from specray.bench.forwards import drafting_table, measure_drafting
    from specray.cli.output import write_json
    from specray.cli.settings import build_config
    from specray.engine.build import build_draft_engine

    values = {"model": model, "dtype": dtype, "device": device, "num_threads": num_threads}
    engine = build_draft_engine(build_config(None, {f"draft.{key}": value for key, value in values.items()}))
    costs = [
        measure_drafting(
            engine,
            num_sequences=sequences,
            temperature=heat,
            num_tokens=num_speculative_tokens,
            context_len=context_len,
            num_repeats=num_repeats,
        )
        for sequences in num_sequences or [1, 8, 32]
        for heat in temperature or [0.0, 1.0]
    ]
    Console().print(drafting_table(costs, title=f"draft {model}, {dtype}"))
    write_json([asdict(cost) for cost in costs], json_path)


def idle(
    duration: Annotated[float, typer.Option(min=1, help="Seconds to watch.")] = 60.0,
    port: Annotated[
        int | None, typer.Option(help="HTTP port of the service, if several run on this machine.")
    ] = None,
    json_path: options.JsonPath = None,
) -> None:
    """Measure what a service that `specray serve` runs here costs while nobody calls it, by process."""
    from specray.bench.idle import idle_table, measure_idle
    from specray.cli.output import wide_console, write_json
    from specray.serving.own_ray.notes import find_note

    rows = measure_idle(find_note(port).pid, duration_s=duration)
    wide_console().print(idle_table(rows, duration_s=duration))
    write_json([asdict(row) for row in rows], json_path)
