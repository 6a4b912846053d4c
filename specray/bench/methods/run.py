"""Runs all methods over one pair, in turns: one request at a time, a router for each method."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from specray.bench.methods.along import fixed_tree, rows_along, walk_along
from specray.bench.methods.method import ALL, PLAIN, Method, MethodRow, Tally
from specray.bench.methods.prompts import LabelledPrompt
from specray.bench.proposals import WrittenOutput
from specray.config import Config
from specray.requests import GenerateRequest, OutputChunk, SpeculationParams
from specray.router import Router
from specray.serving.local.pair import LocalPair, PeerDrafterSource, local_pair
from specray.types import SamplingParams

_DRAFT_SECONDS = "specray_draft_forward_seconds_sum"


async def measure_methods(
    config: Config,
    methods: Sequence[Method],
    prompts: Sequence[LabelledPrompt],
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    num_repeats: int,
    on_progress: Callable[[str], None],
    other_drafts: Mapping[str, Config] | None = None,
) -> list[MethodRow]:
    """Asks for every output with every method, ``num_repeats`` times, and once before to warm up.

    Args:
        config: of the pair; a draft model is needed for the methods that it proposes for.
        other_drafts: those of methods that have one of their own: see ``drafts_of``.
        methods: plain decoding among them.
        on_progress: told what begins.

    Raises:
        ConfigError, EngineLostError: see ``local_pair``.
        SpecrayError: a request failed.
    """
    assert any(method.draft is None for method in methods), "all others are compared with plain decoding"
    rows: list[MethodRow] = []
    async with local_pair(config, other_drafts=other_drafts) as pair:
        for temperature in temperatures:
            rows += await _measure(
                config,
                pair,
                methods,
                prompts,
                temperature,
                max_tokens=max_tokens,
                num_repeats=num_repeats,
                on_progress=on_progress,
            )
    return rows


async def measure_acceptance(
    config: Config,
    methods: Sequence[Method],
    prompts: Sequence[LabelledPrompt],
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    num_draft_steps: int,
    on_progress: Callable[[str], None],
    other_drafts: Mapping[str, Config] | None = None,
) -> list[MethodRow]:
    """Lets the target write every output alone, and leads every method along it: see ``along``.

    What drafts in the target's steps is served instead, all prompts side by side.

    Raises:
        ConfigError: see ``local_pair``; a method's tree is not set, or it has no draft model.
        EngineLostError: an engine did not start or was lost.
        SpecrayError: a request failed.
    """
    rows: list[MethodRow] = []
    async with local_pair(config, other_drafts=other_drafts) as pair:
        addresses = {"": pair.draft, **pair.other_drafts}
        drafters = {
            name: await PeerDrafterSource(address).lease()
            for name, address in addresses.items()
            if address is not None
        }
        for temperature in temperatures:
            on_progress(f"temperature {temperature:g}, the target alone")
            outputs = await written_outputs(config, pair, prompts, temperature, max_tokens)
            tallies: dict[str, list[Tally]] = {}
            for method in methods:
                on_progress(f"temperature {temperature:g}, {method.name}")
                if method.is_in_target:
                    tallies[method.name] = await _served(
                        config, pair, method, prompts, outputs, temperature, max_tokens
                    )
                    continue
                drafter = drafters.get(method.process)
                tallies[method.name] = await walk_along(drafter, method, outputs, num_draft_steps)
            rows += rows_along(temperature, [prompt.category for prompt in prompts], tallies)
        for drafter in drafters.values():
            await drafter.close()
    return rows


async def written_outputs(
    config: Config, pair: LocalPair, prompts: Sequence[LabelledPrompt], temperature: float, max_tokens: int
) -> list[WrittenOutput]:
    """Plain decoding's outputs, many side by side; empty ones have no place."""
    plain = Method.parse(PLAIN)
    async with AsyncExitStack() as stack:
        router = await started(plain.config(config), pair, stack)
        requests = [
            _request(plain, prompt, temperature, max_tokens, 0, place) for place, prompt in enumerate(prompts)
        ]
        outputs = await asyncio.gather(*(router.complete(request) for request in requests))
    return [
        WrittenOutput(request.prompt_token_ids, output.token_ids, request.sampling)
        for request, output in zip(requests, outputs, strict=True)
    ]


async def _served(
    config: Config,
    pair: LocalPair,
    method: Method,
    prompts: Sequence[LabelledPrompt],
    outputs: Sequence[WrittenOutput],
    temperature: float,
    max_tokens: int,
) -> list[Tally]:
    """Lets the target write every output with its own drafts; a tally for each."""
    fixed_tree(method, max_tokens)
    async with AsyncExitStack() as stack:
        router = await started(method.config(config), pair, stack)
        found = await asyncio.gather(
            *(
                router.complete(_request(method, prompt, temperature, max_tokens, 0, place))
                for place, prompt in enumerate(prompts)
            )
        )
    tallies = []
    for output, written in zip(found, outputs, strict=True):
        tally = Tally()
        tally.begin_turn()
        _add(tally, output, seconds=0.0, draft_s=0.0, is_equal=output.token_ids == written.tokens)
        tallies.append(tally)
    return tallies


async def _measure(
    config: Config,
    pair: LocalPair,
    methods: Sequence[Method],
    prompts: Sequence[LabelledPrompt],
    temperature: float,
    *,
    max_tokens: int,
    num_repeats: int,
    on_progress: Callable[[str], None],
) -> list[MethodRow]:
    categories = [ALL, *dict.fromkeys(prompt.category for prompt in prompts if prompt.category)]
    tallies = {(method.name, category): Tally() for method in methods for category in categories}
    plain = next(method for method in methods if method.draft is None)
    outputs: dict[int, tuple[int, ...]] = {}
    async with AsyncExitStack() as stack:
        routers = {
            method.name: await started(method.config(config), pair.with_draft(method.process), stack)
            for method in methods
        }
        for turn in range(-1, num_repeats):
            if turn >= 0:
                for tally in tallies.values():
                    tally.begin_turn()
            for place, prompt in enumerate(prompts):
                # Plain decoding goes first when there is nothing yet to compare with.
                first = (turn + place) % len(methods) if place in outputs else methods.index(plain)
                for method in (*methods[first:], *methods[:first]):
                    on_progress(
                        f"temperature {temperature:g}, turn {max(turn, 0) + 1} of {num_repeats}, "
                        f"prompt {place + 1} of {len(prompts)}, {method.name}"
                    )
                    router = routers[method.name]
                    request = _request(method, prompt, temperature, max_tokens, turn, place)
                    started_s, draft_s = time.monotonic(), router.metrics.value(_DRAFT_SECONDS)
                    output = await router.complete(request)
                    seconds = time.monotonic() - started_s
                    outputs.setdefault(place, output.token_ids)
                    if turn < 0:
                        continue
                    for category in {ALL, prompt.category} - {""}:
                        _add(
                            tallies[method.name, category],
                            output,
                            seconds=seconds,
                            draft_s=router.metrics.value(_DRAFT_SECONDS) - draft_s,
                            is_equal=output.token_ids == outputs[place],
                        )
    return [
        MethodRow.of(
            temperature, category, method.name, tallies[method.name, category], tallies[plain.name, category]
        )
        for category in categories
        for method in methods
    ]


async def started(config: Config, pair: LocalPair, stack: AsyncExitStack) -> Router:
    """A router over the pair that runs until the stack is left."""
    router = pair.router(config)
    await router.start()
    stack.push_async_callback(router.stop)
    return router


def _request(
    method: Method, prompt: LabelledPrompt, temperature: float, max_tokens: int, turn: int, place: int
) -> GenerateRequest:
    num_tokens = len(prompt.token_ids)
    return GenerateRequest(
        f"{method.name}-{temperature:g}-{turn}-{place}",
        prompt.token_ids,
        SamplingParams(temperature=temperature, seed=place, num_prompt_tokens=num_tokens),
        max_tokens,
        speculation=SpeculationParams(enabled=method.draft is not None, draft=method.draft),
    )


def _add(tally: Tally, output: OutputChunk, *, seconds: float, draft_s: float, is_equal: bool) -> None:
    assert output.stats is not None, "the last chunk has them"
    num_tokens = len(output.token_ids)
    tally.add(output.stats, num_tokens=num_tokens, seconds=seconds, draft_s=draft_s, is_equal=is_equal)


def with_plain(methods: Sequence[Method]) -> list[Method]:
    """The methods, with plain decoding before them if it is not among them."""
    has_plain = any(method.draft is None for method in methods)
    return list(methods) if has_plain else [Method.parse(PLAIN), *methods]
