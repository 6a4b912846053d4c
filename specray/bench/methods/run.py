"""Runs all methods over one pair, in turns: one request at a time, a router for each method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from specray.bench.core.figures import Tally
from specray.bench.core.service import ask_all, request_of, running, running_all, timed
from specray.bench.core.turns import in_turns
from specray.bench.methods.along import fixed_tree, rows_along, walk_along
from specray.bench.methods.method import ALL, PLAIN, Method, MethodRow
from specray.bench.methods.prompts import LabelledPrompt
from specray.bench.proposals import WrittenOutput, written
from specray.config import Config
from specray.requests import GenerateRequest, SpeculationParams
from specray.serving.local.pair import LocalPair, PeerDrafterSource, local_pair

if TYPE_CHECKING:
    from specray.bench.plans import MethodsPlan

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
        on_progress: called with what begins.

    Raises:
        ConfigError, EngineLostError: see ``local_pair``.
        SpecrayError: a request failed.
    """
    plain = next(method for method in methods if method.draft is None)
    # Plain decoding goes first while there is nothing yet to compare with.
    ordered = sorted(methods, key=lambda method: method is not plain)
    categories = [ALL, *dict.fromkeys(prompt.category for prompt in prompts if prompt.category)]
    rows: list[MethodRow] = []
    async with local_pair(config, other_drafts=other_drafts) as pair:
        for temperature in temperatures:
            outputs: dict[int, tuple[int, ...]] = {}
            tallies = {(method.name, category): Tally() for method in methods for category in categories}
            async with running_all(_routers(config, pair, methods)) as routers:
                turns = in_turns(ordered, num_repeats, num_warmup=1, num_places=len(prompts), is_rotated=True)
                for turn, place, method in turns:
                    router = routers[method.name]
                    on_progress(
                        f"temperature {temperature:g}, turn {max(turn, 0) + 1} of {num_repeats}, "
                        f"prompt {place + 1} of {len(prompts)}, {method.name}"
                    )
                    request = _request(method, prompts[place], temperature, max_tokens, turn, place)
                    draft_s = router.metrics.value(_DRAFT_SECONDS)
                    (output,), seconds = await timed(router, [request])
                    outputs.setdefault(place, output.token_ids)
                    if turn < 0:
                        continue
                    draft_s = router.metrics.value(_DRAFT_SECONDS) - draft_s
                    for category in categories:
                        tally = tallies[method.name, category]
                        if place == 0:
                            tally.begin_turn()
                        if category in (ALL, prompts[place].category):
                            is_equal = output.token_ids == outputs[place]
                            tally.add_output(output, seconds=seconds, draft_s=draft_s, is_equal=is_equal)
            for category in categories:
                base = tallies[plain.name, category]
                for name in (method.name for method in methods):
                    rows.append(MethodRow.of(temperature, category, name, tallies[name, category], base))
    return rows


def _routers(
    config: Config, pair: LocalPair, methods: Sequence[Method]
) -> dict[str, tuple[LocalPair, Config]]:
    return {method.name: (pair.with_draft(method.process), method.config(config)) for method in methods}


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
    """Plain decoding's outputs, many at a time; empty ones have no place."""
    plain = Method.parse(PLAIN)
    requests = [
        _request(plain, prompt, temperature, max_tokens, 0, place) for place, prompt in enumerate(prompts)
    ]
    async with running(pair, plain.config(config)) as router:
        return written(requests, await ask_all(router, requests))


async def _served(
    config: Config,
    pair: LocalPair,
    method: Method,
    prompts: Sequence[LabelledPrompt],
    outputs: Sequence[WrittenOutput],
    temperature: float,
    max_tokens: int,
) -> list[Tally]:
    fixed_tree(method, max_tokens)
    requests = [
        _request(method, prompt, temperature, max_tokens, 0, place) for place, prompt in enumerate(prompts)
    ]
    async with running(pair, method.config(config)) as router:
        found = await ask_all(router, requests)
    return [
        Tally.of(output, is_equal=output.token_ids == own.tokens)
        for output, own in zip(found, outputs, strict=True)
    ]


def _request(
    method: Method, prompt: LabelledPrompt, temperature: float, max_tokens: int, turn: int, place: int
) -> GenerateRequest:
    return request_of(
        f"{method.name}-{temperature:g}-{turn}-{place}",
        prompt.token_ids,
        max_tokens,
        temperature=temperature,
        seed=place,
        speculation=SpeculationParams(enabled=method.draft is not None, draft=method.draft),
    )


async def run_plan(
    config: Config,
    plan: MethodsPlan,
    methods: Sequence[Method],
    prompts: Sequence[LabelledPrompt],
    other_drafts: Mapping[str, Config],
    on_progress: Callable[[str], None],
) -> list[MethodRow]:
    """Measures the methods as planned. Raises like ``measure_methods``."""
    measure = (
        partial(measure_acceptance, num_draft_steps=int(config.speculation.num_speculative_tokens))
        if plan.only_acceptance
        else partial(measure_methods, num_repeats=plan.num_repeats)
    )
    return await measure(
        config,
        methods,
        prompts,
        temperatures=plan.temperature or (0.0, 1.0),
        max_tokens=plan.max_tokens,
        on_progress=on_progress,
        other_drafts=other_drafts,
    )
