"""``specray bench`` of parts: router, rpc, forwards, quantization, adapters, prefix, drafting, idle."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from specray.cli import options
from specray.cli.bench.engines import ModelOptions
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


@options.flattened
def forwards(
    engine: ModelOptions,
    role: options.Role = options.EngineRole.TARGET,
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
    from specray.cli.output import wide_console, write_json

    runners = build_runners(
        getattr(engine.config(role), role),
        formats or ["none"],
        role.value,
        num_sequences=max(num_sequences or [1]),
    )
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
    wide_console().print(forwards_table(costs, title=engine.title(role)))
    write_json([asdict(cost) for cost in costs], json_path)


@options.flattened
def quantization(
    engine: ModelOptions,
    role: options.Role = options.EngineRole.TARGET,
    formats: options.WeightFormats = None,
    text: Annotated[Path | None, typer.Option(help="Text to predict; default: Python's reference.")] = None,
    num_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text, from its beginning.")] = 8192,
    window_len: Annotated[int, typer.Option(min=2, help="Tokens that are read at once.")] = 256,
    json_path: options.JsonPath = None,
) -> None:
    """Measure the loss of a text with weights in several formats, and the agreement with the first."""
    from rich.console import Console

    from specray.environment import apply_thread_environment

    apply_thread_environment()
    from specray.bench.quantization import build_runners, measure_quality, quality_table, read_text
    from specray.cli.output import wide_console, write_json
    from specray.engine.model.description import model_path
    from specray.tokenization import load_tokenizer

    section = getattr(engine.config(role), role)
    chosen = formats or ["none", "int8", "int4", "int8:int8", "int4:int8", "int4:int4"]
    console = Console(stderr=True)
    with console.status("loading") as status:
        tokenizer = load_tokenizer(model_path(section, role.value))
        # A token has less than 16 characters, but for runs of blanks and the like.
        token_ids = tokenizer.encode(read_text(text)[: 16 * num_tokens])[:num_tokens]
        runners = build_runners(section, chosen, role.value)
        qualities = measure_quality(
            runners,
            token_ids,
            window_len=window_len,
            progress=lambda done, total: status.update(f"{done} of {total} tokens"),
        )
    wide_console().print(quality_table(qualities, title=engine.title(role)))
    write_json([asdict(quality) for quality in qualities], json_path)


@options.flattened
def adapters(
    engine: ModelOptions,
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
    from tempfile import TemporaryDirectory

    from specray.environment import apply_thread_environment

    apply_thread_environment()
    from specray.bench.adapters import adapters_table, measure_adapters
    from specray.cli.output import wide_console, write_json

    role = options.EngineRole.TARGET
    with TemporaryDirectory(prefix="specray-adapters-") as directory:
        costs = measure_adapters(
            engine.config(role).target,
            Path(directory),
            num_rows=num_sequences or [1, 8],
            num_adapters=num_adapters or [0, 1, 4],
            rank=rank,
            context_len=context_len,
            num_repeats=num_repeats,
        )
    wide_console().print(adapters_table(costs, title=f"adapters of rank {rank}, {engine.title(role)}"))
    write_json([asdict(cost) for cost in costs], json_path)


@options.flattened
def prefix(
    engine: ModelOptions,
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
    from specray.engine.build import build_target_engine

    lengths, role = prompt_len or [2000], options.EngineRole.TARGET
    built = build_target_engine(
        engine.config(role, profile_s=0, max_model_len=max(lengths) + 16, max_num_seqs=2)
    )
    costs = [
        measure_turn(built, Turn(length, answer_len, message_len), num_repeats=num_repeats, seed=length)
        for length in lengths
    ]
    wide_console().print(turns_table(costs, title=engine.title(role)))
    write_json([asdict(cost) for cost in costs], json_path)


@options.flattened
def drafting(
    engine: ModelOptions,
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
    from specray.engine.build import build_draft_engine

    role = options.EngineRole.DRAFT
    built = build_draft_engine(engine.config(role))
    costs = [
        measure_drafting(
            built,
            num_sequences=sequences,
            temperature=heat,
            num_tokens=num_speculative_tokens,
            context_len=context_len,
            num_repeats=num_repeats,
        )
        for sequences in num_sequences or [1, 8, 32]
        for heat in temperature or [0.0, 1.0]
    ]
    Console().print(drafting_table(costs, title=engine.title(role)))
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
