"""``specray generate``: the continuation of one prompt, by a running server or by a pair started for it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specray.cli import options
from specray.cli.options import option
from specray.requests import SpeculationStats

if TYPE_CHECKING:
    from specray.config import Config

EXIT_TERMINATED = 143


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """A part of the output text; the last part carries the counts."""

    text: str
    num_output_tokens: int | None = None
    stats: SpeculationStats | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the output is drawn."""

    max_tokens: int = option(128, "Maximum output tokens.")
    temperature: float = option(0.0, "Sampling temperature; 0 is greedy.")
    top_p: float = option(1.0, "Nucleus sampling: share of probability, in (0, 1].")
    seed: int | None = option(None, "Seed of sampling; default: random.")
    stop: list[str] | None = option(None, "String that ends the output; may be repeated.")
    speculation: bool = option(True, "Use the draft, or let the target decode alone.")
    model: str | None = option(None, "With --server: one of its models or adapters; default: its only one.")


@dataclass(frozen=True, slots=True)
class PairOptions:
    """The pair that is started for the prompt, see ``settings.pair_options``."""

    target: options.TargetModel = None
    draft: options.Draft = None
    drafter: options.Drafter = None
    dtype: options.Dtype = None
    weights: options.StoredBits = None
    device: options.Device = None
    num_speculative_tokens: options.NumSpeculativeTokens = None
    verification: options.Verification = None
    overlap: options.OverlapMode = None
    tree: options.Tree = None


@options.flattened
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    pair: PairOptions,
    sampling: Sampling,
    server: Annotated[
        str | None, typer.Option(help="URL of a running server; default: start a pair for this prompt.")
    ] = None,
    config: options.ConfigPath = None,
    settings: options.Settings = None,
) -> None:
    """Print the continuation of a prompt as it is generated, and what speculation did (on stderr)."""
    from specray.cli.settings import build_config, pair_options

    text = sys.stdin.read() if prompt == "-" else prompt
    if server is not None:
        pieces = from_server(server, text, sampling)
    else:
        values = pair_options(**asdict(pair))
        pieces = from_own_pair(build_config(config, values, settings or []), text, sampling)

    from specray.rpc.event_loop import new_event_loop

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            runner.run(print_pieces(pieces))
        except asyncio.CancelledError:
            raise typer.Exit(EXIT_TERMINATED) from None


async def print_pieces(pieces: AsyncGenerator[OutputPiece, None]) -> None:
    """Prints the pieces as they come. SIGTERM closes the generator, which ends the processes it started."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    started_s, last = 0.0, None
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            started_s = started_s or time.monotonic()
            print(piece.text, end="", flush=True)
            last = piece if piece.num_output_tokens is not None else last
    print(flush=True)
    if last is not None:
        print(_summary(last, time.monotonic() - started_s), file=sys.stderr)


def _summary(last: OutputPiece, seconds: float) -> str:
    """Describes one output; ``seconds`` is the time from its first piece to its last."""
    line = f"{last.num_output_tokens} tokens, {seconds:.2f} s after the first"
    stats = last.stats
    if stats is None or stats.mean_acceptance_length is None:
        return f"{line}; no speculation"
    return (
        f"{line}; {stats.num_spec_steps} speculative rounds, "
        f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} draft tokens accepted "
        f"({stats.draft_acceptance_rate:.2f}), mean acceptance length {stats.mean_acceptance_length:.2f}"
    )


async def from_own_pair(config: Config, prompt: str, sampling: Sampling) -> AsyncGenerator[OutputPiece, None]:
    from specray.serving.calls.generate_requests import to_generate_requests
    from specray.serving.calls.limits import ServiceLimits
    from specray.serving.calls.prompts import encode_prompts, parse_prompt
    from specray.serving.generation import stream
    from specray.serving.local.pair import local_router
    from specray.serving.validation import GenerationOptions
    from specray.tokenization import load_tokenizer, make_stop_matcher

    prompts = parse_prompt(prompt)
    tokenizer = await asyncio.to_thread(load_tokenizer, config.target.model)
    async with local_router(config, stop_matchers=make_stop_matcher(tokenizer)) as router:
        requests = to_generate_requests(
            encode_prompts(prompts, tokenizer),
            GenerationOptions(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=sampling.seed,
                stop=tuple(sampling.stop or ()),
                speculation_enabled=sampling.speculation,
            ),
            limits=await ServiceLimits(router, tokenizer, config).get(),
            request_id="generate",
        )
        num_output_tokens = 0
        timeout_s = config.router.request_timeout_s
        async for delta in stream(router, requests, tokenizer, timeout_s=timeout_s):
            num_output_tokens += len(delta.token_ids)
            is_last = delta.finish_reason is not None
            yield OutputPiece(delta.text, num_output_tokens if is_last else None, delta.stats)


async def from_server(url: str, prompt: str, sampling: Sampling) -> AsyncGenerator[OutputPiece, None]:
    from specray.bench.load.client import ServerClient
    from specray.environment import api_key

    body: dict[str, Any] = {
        "prompt": prompt,
        **asdict(sampling),
        "stop": sampling.stop or [],
        "model": sampling.model or "",
        "speculation": {"enabled": sampling.speculation},
        "stream_options": {"include_usage": True},
        "return_speculation_metrics": True,
    }
    async with ServerClient(url, key=api_key()) as client:
        async for event in client.stream_completion(body):
            usage = event.body.get("usage")
            if not usage:
                yield OutputPiece(event.text)
                continue
            yield OutputPiece(event.text, int(usage["completion_tokens"]), _stats(event.body.get("metrics")))


def _stats(metrics: dict[str, Any] | None) -> SpeculationStats | None:
    if metrics is None:
        return None
    fields = metrics["speculative_decoding"]
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    counts = {name: fields[name] for name in names}
    return SpeculationStats(**counts, acceptance_histogram=tuple(fields["acceptance_histogram"]))
