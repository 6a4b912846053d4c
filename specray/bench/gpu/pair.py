"""Runs draft and target as processes over gRPC: checks their tokens, and measures their speed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specray.bench.core.arm import Arm
from specray.bench.load.prompts import Dataset, load_prompts
from specray.bench.overlap.run import measure_arms, overlap_arm
from specray.config import Config
from specray.serving.local.pair import local_pair
from specray.tokenization import load_tokenizer
from specray.types import Overlap

PLAIN = overlap_arm(0, Overlap.SERIAL)
Outputs = dict[tuple[str, float, int], tuple[int, ...]]
"""Token ids by arm, temperature and prompt."""


@dataclass(frozen=True, slots=True)
class OutputAgreement:
    """Outputs of one arm, compared with plain decoding of the same prompts, seeds and temperature."""

    arm: str
    temperature: float
    num_outputs: int
    num_equal: int
    num_tokens: int
    """Tokens compared: up to the first difference of each output, which is included."""
    num_divergences: int

    @property
    def divergence_rate(self) -> float:
        """First differences per token compared."""
        return self.num_divergences / self.num_tokens if self.num_tokens else 0.0


def arms_of(ks: Sequence[int], *, with_auto: bool) -> list[Arm]:
    """Returns plain, serial and overlapped arms with each K, and one where the controller chooses."""
    arms = [PLAIN, *(overlap_arm(k, overlap) for overlap in (Overlap.SERIAL, Overlap.ENUMERATE) for k in ks)]
    return [*arms, overlap_arm("auto", "auto")] if with_auto else arms


def measure(
    config: Config,
    *,
    num_prompts: int,
    max_tokens: int,
    num_repeats: int,
    ks: Sequence[int],
    with_auto: bool,
    temperatures: Sequence[float] = (0.0, 1.0),
) -> dict[str, Any]:
    """Serves the prompts with every arm.

    Raises like ``local_pair``.
    """
    arms = arms_of(ks, with_auto=with_auto)
    prompts = encoded_prompts(config.target.model, num_prompts)
    outputs: Outputs = {}

    def keep(arm: Arm, temperature: float, index: int, output: Sequence[int]) -> None:
        outputs.setdefault((arm.name, temperature, index), tuple(output))

    async def run() -> list[dict[str, Any]]:
        async with local_pair(config) as pair:
            results = await measure_arms(
                config,
                pair,
                arms,
                prompts,
                temperatures=temperatures,
                max_tokens=max_tokens,
                num_repeats=num_repeats,
                progress=lambda text: print(text, file=sys.stderr, flush=True),
                on_output=keep,
            )
        return [asdict(result) for result in results]

    results = asyncio.run(run())
    agreements = [
        compare(outputs, arm.name, temperature, num_prompts)
        for temperature in temperatures
        for arm in arms[1:]
    ]
    return {
        "dtype": config.target.dtype,
        "arms": results,
        "agreements": [{**asdict(entry), "divergence_rate": entry.divergence_rate} for entry in agreements],
        "greedy": [list(outputs[PLAIN.name, 0.0, index]) for index in range(num_prompts)],
    }


def encoded_prompts(model: str, num_prompts: int) -> list[list[int]]:
    """Returns the built-in prompts as token ids."""
    from specray.config import EMBEDDED
    from specray.demo.paths import demo_target_path

    tokenizer = load_tokenizer(str(demo_target_path()) if model == EMBEDDED else model)
    return [list(tokenizer.encode(prompt)) for prompt in load_prompts(Dataset.BUILTIN, None, num_prompts)]


def compare(
    outputs: Mapping[tuple[str, float, int], tuple[int, ...]], arm: str, temperature: float, num_prompts: int
) -> OutputAgreement:
    """Compares an arm with plain decoding."""
    num_equal = num_tokens = 0
    for index in range(num_prompts):
        ours, plain = outputs[arm, temperature, index], outputs[PLAIN.name, temperature, index]
        num_equal += ours == plain
        num_tokens += num_compared(ours, plain)
    return OutputAgreement(arm, temperature, num_prompts, num_equal, num_tokens, num_prompts - num_equal)


def num_compared(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Counts the tokens up to the first difference, which is included."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return index + 1
    return max(len(ours), len(theirs))
