"""What each measurement is asked for. The fields of a plan are the options of its command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.core.options import (
    DEFAULT_URL,
    Concurrency,
    IsChat,
    MaxTokens,
    NumPrompts,
    NumTurns,
    PromptSourceOptions,
    RequestTimeout,
    Seed,
    ServerUrl,
    Temperature,
    Temperatures,
)
from specray.bench.testbed.kinds import LinkKind
from specray.bench.verify.tasks import TaskKind
from specray.types import MAX_SPECULATIVE_TOKENS

OVERLAP_ARMS = ("off:0", "serial:2", "serial:3", "serial:4", "auto:auto")
METHODS = (
    *("plain", "model", "model:auto", "model:16"),
    *("cascade", "ngram", "ngram:16", "suffix", "suffix:16", "lookahead"),
)


@dataclass(frozen=True, slots=True)
class ServePlan(PromptSourceOptions):
    """A running server, with speculation off and on in turns."""

    url: ServerUrl = DEFAULT_URL
    num_prompts: NumPrompts = 12
    num_repeats: NumTurns = 2
    max_tokens: MaxTokens = 128
    concurrency: Concurrency = 1
    temperature: Temperature = 0.0
    seed: Seed = 0
    num_warmup: Annotated[int, typer.Option(min=0, help="Requests per arm that are not counted.")] = 2
    num_speculative_tokens: Annotated[
        list[int] | None,
        typer.Option(min=0, max=MAX_SPECULATIVE_TOKENS, help="Adds an arm with this K; may be repeated."),
    ] = None
    ignore_eos: Annotated[bool, typer.Option(help="Let every output have max-tokens tokens.")] = True
    stream: Annotated[
        bool, typer.Option(help="Stream the outputs; without, TTFT and ITL are not measured.")
    ] = True
    fresh_prompts: Annotated[
        bool, typer.Option(help="Give every arm and pass a part of the prefix cache of its own.")
    ] = True
    chat: Annotated[bool, typer.Option(help="Send each prompt as a user's message of a chat.")] = False
    timeout_s: RequestTimeout = 600.0


@dataclass(frozen=True, slots=True)
class PlainPlan(PromptSourceOptions):
    """Plain decoding of a running server, in turns with forwards of its target in this process."""

    url: ServerUrl = DEFAULT_URL
    num_prompts: NumPrompts = 12
    num_turns: Annotated[int, typer.Option(min=1, help="Turns of forwards here and prompts there.")] = 3
    max_tokens: Annotated[int, typer.Option(min=2, help="Output tokens per prompt.")] = 128
    num_warmup: Annotated[int, typer.Option(min=0, help="Requests per turn that are not counted.")] = 2
    context_len: Annotated[int, typer.Option(min=0, help="Tokens in the KV cache before each forward.")] = 256
    num_repeats: Annotated[int, typer.Option(min=1, help="Forwards per width and turn.")] = 50
    timeout_s: RequestTimeout = 600.0


@dataclass(frozen=True, slots=True)
class OverlapPlan(PromptSourceOptions):
    """Plain, serial and overlapped rounds of a pair in turns."""

    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="OVERLAP:K or OVERLAP:K:TREE, such as serial:3, enumerate:2, serial:auto:auto, "
            f"enumerate:4:16, off:0; may be repeated. Default: {', '.join(OVERLAP_ARMS)}."
        ),
    ] = None
    temperature: Temperatures = None
    delay_ms: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Delay added between router and draft, each way; may be repeated."),
    ] = None
    link: Annotated[
        LinkKind,
        typer.Option(
            help="What makes the delay: a process that relays the bytes, or a network namespace for the "
            "draft (needs root)."
        ),
    ] = LinkKind.RELAY
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts per pass; at least two for each request at a time.")
    ] = 4
    num_repeats: NumTurns = 2
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, max=256, help="Requests at a time; may be repeated.")
    ] = None
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Output tokens per prompt; the mean, with several requests at a time.")
    ] = 128

    @property
    def arms(self) -> Sequence[str]:
        return self.arm or OVERLAP_ARMS


@dataclass(frozen=True, slots=True)
class MethodsPlan(PromptSourceOptions):
    """Every method of drafting for one target in turns."""

    method: Annotated[
        list[str] | None,
        typer.Option(
            help="plain, service (what the service chooses), lookahead, "
            "cascade (the draft model with draft.draft, ngram if it has none), pard; "
            "model, features, ngram or suffix, also with a tree, such as model:auto, model:4x2x1, ngram:16; "
            f"may be repeated. Default: {', '.join(METHODS)}, pard with --pard, and features and "
            "features:16 with --drafter."
        ),
    ] = None
    num_prompts: NumPrompts = 13
    context: Annotated[
        Path | None, typer.Option(help="Text file, of which a piece of its own goes before each prompt.")
    ] = None
    context_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each piece of --context.")] = 4096
    chat: IsChat = True
    only_acceptance: Annotated[
        bool,
        typer.Option(
            "--only-acceptance",
            help="Let the target write the outputs alone, and lead each method along them: no speeds, and K "
            "set.",
        ),
    ] = False
    temperature: Temperatures = None
    num_repeats: Annotated[
        int, typer.Option(min=1, help="Turns, in each of which every method is asked for all outputs.")
    ] = 3
    max_tokens: MaxTokens = 128


@dataclass(frozen=True, slots=True)
class PredictionPlan(PromptSourceOptions):
    """The target's own outputs as predictions, as they are and edited."""

    num_prompts: Annotated[int, typer.Option(min=2, help="Number of different prompts.")] = 4
    num_repeats: Annotated[
        int, typer.Option(min=1, help="Turns, in each of which every arm asks for all outputs.")
    ] = 3
    max_tokens: MaxTokens = 256
    seed: Seed = 0


@dataclass(frozen=True, slots=True)
class OverloadPlan(PromptSourceOptions):
    """A running server at its capacity, and then at a multiple of it."""

    url: Annotated[str, typer.Option(help="URL of the running server, http only.")] = DEFAULT_URL
    num_prompts: NumPrompts = 12
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests at a time while the capacity is measured.")
    ] = 64
    warmup: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds of load before anything counts.")
    ] = 20.0
    capacity_duration: Annotated[
        float,
        typer.Option(min=1, max=3600, help="Seconds for which the capacity is measured, in a closed loop."),
    ] = 20.0
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Capacity in requests per second; default: as measured."),
    ] = None
    factor: Annotated[
        float, typer.Option(min=0.1, max=1000, help="Arrival rate, as a multiple of the capacity.")
    ] = 10.0
    duration: Annotated[float, typer.Option(min=1, max=3600, help="Seconds of overload.")] = 60.0
    max_requests: Annotated[int, typer.Option(min=1, help="Maximum requests during the overload.")] = 100_000
    max_tokens: Annotated[int, typer.Option(min=2, help="Output tokens per request.")] = 128
    temperature: Temperature = 0.0
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="Tenant that sends requests, in turn with others; may be repeated."),
    ] = None
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Service level of some requests: ms to the first token.")
    ] = None
    slo_itl_ms: Annotated[
        float | None,
        typer.Option(min=0.001, help="Service level of some requests: ms per output token after it."),
    ] = None
    slo_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the requests that have the level.")
    ] = 0.25
    send_slo: Annotated[
        bool, typer.Option(help="Tell the server of the level; without, the same requests go without one.")
    ] = True
    seed: Seed = 0
    timeout_s: RequestTimeout = 120.0

    @property
    def slo(self) -> dict[str, float]:
        """The service level of a share of the requests; empty: none has one."""
        values = {"ttft_ms": self.slo_ttft_ms, "itl_ms": self.slo_itl_ms}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class StructuredPlan:
    """JSON by many schemas, and hostile grammars."""

    url: ServerUrl = DEFAULT_URL
    num_schemas: Annotated[
        int, typer.Option(min=0, help="Number of schemas, composed by the seed; 0: none.")
    ] = 200
    temperature: Temperatures = None
    arm: Annotated[
        list[str] | None,
        typer.Option(help="Adds an arm next to off: on or n-grams; default: both. May be repeated."),
    ] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of an answer, at most.")] = 96
    concurrency: Concurrency = 1
    seed: Seed = 0
    hostile: Annotated[
        bool, typer.Option(help="Also measure hostile grammars next to ordinary requests.")
    ] = False
    num_others: Annotated[
        int, typer.Option(min=1, help="Ordinary requests at a time next to hostile grammars.")
    ] = 2
    attack: Annotated[
        list[str] | None, typer.Option(help="Hostile grammar by its name in the report; default: all.")
    ] = None
    attack_s: Annotated[float, typer.Option(min=0.1, help="Seconds of each hostile grammar.")] = 5.0
    attack_pause_s: Annotated[
        float,
        typer.Option(min=0, help="Seconds between an answer and the next hostile grammar; 0: a flood."),
    ] = 0.25
    quiet_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds of ordinary requests alone before each of them.")
    ] = 5.0
    timeout_s: RequestTimeout = 120.0


@dataclass(frozen=True, slots=True)
class VerifyPlan(PromptSourceOptions):
    """A running service compared with itself without drafts."""

    url: ServerUrl = DEFAULT_URL
    model: Annotated[
        str, typer.Option(help="Model or adapter of the service, by its name; default: its first model.")
    ] = ""
    num_prompts: NumPrompts = 12
    max_tokens: MaxTokens = 48
    concurrency: Concurrency = 4
    """Except those of plain decoding that all others are compared with."""
    seed: Seed = 0
    num_samples: Annotated[
        int, typer.Option(min=0, help="Outputs of each prompt under rejection, for each way; 0: none.")
    ] = 8
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Take one other token for a fault: for a service that is deterministic (/v1/models says "
            "so), whose logprobs must be the same, too, or one in float32.",
        ),
    ] = False
    case: Annotated[
        list[str] | None,
        typer.Option(help="Way to sample, by its name in the report; may be repeated; default: all."),
    ] = None
    way: Annotated[
        list[str] | None,
        typer.Option(help="Way to draft, by its name in the report; may be repeated; default: all."),
    ] = None
    tasks: Annotated[TaskKind, typer.Option(help="How the tasks of --tasks-path are scored.")] = (
        TaskKind.HUMANEVAL
    )
    tasks_path: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Tasks to solve with and without drafts; humaneval runs what the model writes.",
        ),
    ] = None
    num_tasks: Annotated[int, typer.Option(min=1, help="Tasks, the first of the file.")] = 40
    timeout_s: RequestTimeout = 600.0


@dataclass(frozen=True, slots=True)
class RoutingPlan:
    """Conversations on several Routers, routed by prefix and by load in turns."""

    num_routers: Annotated[
        int, typer.Option(help="Routers, each with a target of its own.", min=2, max=64)
    ] = 4
    num_conversations: Annotated[int, typer.Option(help="Conversations in all.", min=1)] = 24
    concurrency: Annotated[int, typer.Option(help="Conversations at a time.", min=1)] = 8
    num_turns: Annotated[int, typer.Option(help="Turns of a conversation.", min=1)] = 8
    num_tenants: Annotated[
        int, typer.Option(help="System prompts, which conversations have in turn.", min=1)
    ] = 16
    system_tokens: Annotated[
        int, typer.Option(help="Tokens of a system prompt; 0: nothing is shared.", min=0)
    ] = 192
    user_tokens: Annotated[int, typer.Option(help="Tokens of what a user says.", min=1)] = 24
    output_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 16
    num_repeats: Annotated[int, typer.Option(help="Turns of all arms.", min=1)] = 1
    seed: Seed = 0
    profile: Annotated[
        Path | None, typer.Option(help="Profile that `specray profile` wrote: the fleet is simulated, too.")
    ] = None
