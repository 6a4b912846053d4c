"""The requests of a soak: a fixed set, so that each has one right answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from specray.bench.load.prompts import BUILTIN_PROMPTS
from specray.rpc.inference.types import GenerateParams

_LONG_TOKENS = (120, 240)


class Way(StrEnum):
    STREAM = "stream"
    """Server-sent events over HTTP."""
    WHOLE = "whole"
    """One response over HTTP."""
    GRPC = "grpc"
    """The gRPC service, which returns token ids."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request, whichever way it is sent; its output depends on nothing else."""

    index: int
    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    adapter: str = ""
    """Name of its adapter; empty: the base."""
    model: str = ""
    """Name of its model; empty: the only one."""

    @property
    def is_long(self) -> bool:
        return self.max_tokens >= _LONG_TOKENS[0]

    def body(self, model: str) -> dict[str, Any]:
        """Returns the body for /v1/completions."""
        return {
            "model": self.adapter or self.model or model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "ignore_eos": True,
        }

    def params(self, *, has_speculation: bool = True) -> GenerateParams:
        """Returns the parameters for Generate; without speculation it gives the reference."""
        return GenerateParams(
            model=self.model,
            text=self.prompt,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            ignore_eos=True,
            speculation_enabled=None if has_speculation else False,
            adapter=self.adapter,
        )


@dataclass(frozen=True, slots=True)
class ClientOutput:
    """The output of one request at its client: all of it, or the part before the end."""

    text: str
    token_ids: tuple[int, ...] | None
    """Token ids; None where the way does not return them."""
    num_tokens: int | None
    """Number of tokens; None before the end."""

    @property
    def is_whole(self) -> bool:
        return self.num_tokens is not None


def make_cases(
    num_cases: int, *, seed: int, adapters: Sequence[str] = (), models: Sequence[str] = ("",)
) -> tuple[Case, ...]:
    """Makes short and long requests, greedy and with seeds, with and without processors.

    Args:
        adapters: names that take turns with the base.
        models: names that take turns.
    """
    rng = random.Random(seed)
    names = ("", *adapters)
    return tuple(
        replace(
            _case(index, rng),
            adapter=names[index // 2 % len(names)],
            # Of two that follow one another, one is long.
            model=models[index // 2 % len(models)],
        )
        for index in range(num_cases)
    )


def difference(output: ClientOutput, reference: ClientOutput) -> str | None:
    """Describes where an output, or the beginning of one, differs from the reference; None: nowhere."""
    if output.token_ids is not None and reference.token_ids is not None:
        place = _first_difference(output.token_ids, reference.token_ids)
        if place is not None:
            return f"token {place} differs"
    place = _first_difference(output.text, reference.text)
    if place is not None:
        return f"the text differs from character {place}"
    if output.is_whole and (output.num_tokens, output.text) != (reference.num_tokens, reference.text):
        return f"{output.num_tokens} tokens, not {reference.num_tokens}"
    return None


def _first_difference(values: Sequence[object], wanted: Sequence[object]) -> int | None:
    if values == wanted[: len(values)]:
        return None
    pairs = zip(values, wanted, strict=False)
    return next((place for place, (got, want) in enumerate(pairs) if got != want), len(wanted))


def _case(index: int, rng: random.Random) -> Case:
    is_long = index % 2 == 0
    prompts = rng.sample(BUILTIN_PROMPTS, 6 if index % 3 == 0 else 1)
    has_processors = index % 5 == 4
    return Case(
        index=index,
        prompt="\n".join(prompts),
        max_tokens=rng.randint(*(_LONG_TOKENS if is_long else (8, 48))),
        temperature=(0.0, 1.0, 0.7)[index % 3],
        seed=rng.randint(0, 2**31 - 1),
        top_p=0.9 if has_processors else 1.0,
        frequency_penalty=0.5 if has_processors else 0.0,
    )
