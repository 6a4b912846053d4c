"""Measures the first token of a chat's next turn, with a warm prefix cache and with a cold one."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.table import Table

from specray.bench.core.report import number, table_of
from specray.bench.core.turns import in_turns
from specray.errors import ConfigError, SpecrayError
from specray.interfaces import SyncTargetEngine
from specray.types import SamplingParams, Verdict, VerifyItem


class Turn(NamedTuple):
    """Sizes of the turn that is measured, in tokens."""

    num_prompt: int
    """All of its prompt: what was said before, and a message."""
    num_answer: int
    """The answer before the message."""
    num_message: int

    @property
    def num_before(self) -> int:
        """Tokens of the prompt before that answer."""
        return self.num_prompt - self.num_answer - self.num_message


@dataclass(frozen=True, slots=True)
class TurnCost:
    """Times to the first token of one turn; medians over the repetitions."""

    num_prompt: int
    num_found: int
    """Tokens of its prompt that were found."""
    cold_ms: float
    warm_ms: float
    times_faster: float
    """Median of cold over warm, repetition by repetition."""
    least_faster: float
    most_faster: float
    load: float
    """Load average of the last minute at the end: runnable threads of the whole machine."""


def measure_turn(engine: SyncTargetEngine, turn: Turn, *, num_repeats: int = 5, seed: int = 0) -> TurnCost:
    """Measures a turn of random tokens, each time of others, after its answer was generated token by token.

    Raises:
        ConfigError: the engine has no room for the turn, or its sizes do not fit together.
    """
    most = engine.info.max_model_len - 1
    if turn.num_prompt > most or turn.num_before < 1 or min(turn) < 1:
        raise ConfigError(
            f"prompt_len is {turn.num_prompt} with an answer of {turn.num_answer} and a message of "
            f"{turn.num_message}; allowed: more than these together, up to {most}"
        )
    drawn = random.Random(seed)
    prompts: dict[int, list[int]] = {}
    times: dict[str, list[float]] = {"warm": [], "cold": []}
    found = 0
    for each in in_turns(("warm", "cold"), num_repeats, num_warmup=1, is_rotated=True):
        if each.number not in prompts:
            prompts[each.number] = _prompt(engine, turn, drawn, each.number)
        # Another salt: nothing is shared with the turn before.
        salt = "" if each.arm == "warm" else f"cold {each.number}"
        began = time.perf_counter()
        verdict = _verify(engine, f"{each.arm} {each.number}", prompts[each.number], salt=salt)
        if each.counts:
            times[each.arm].append(1e3 * (time.perf_counter() - began))
            found = verdict.num_cached_tokens if each.arm == "warm" else found
        engine.release([verdict.request_id])
    ratios = [cold / warm for cold, warm in zip(times["cold"], times["warm"], strict=True)]
    return TurnCost(
        turn.num_prompt,
        found,
        statistics.median(times["cold"]),
        statistics.median(times["warm"]),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        os.getloadavg()[0],
    )


def turns_table(costs: Sequence[TurnCost], *, title: str) -> Table:
    columns: dict[str, Callable[[TurnCost], object]] = {
        "prompt tokens": lambda cost: cost.num_prompt,
        "found": lambda cost: cost.num_found,
        "cold ms": lambda cost: number(cost.cold_ms, 1),
        "warm ms": lambda cost: number(cost.warm_ms, 1),
        "times faster": lambda cost: cost.times_faster,
        "least": lambda cost: cost.least_faster,
        "most": lambda cost: cost.most_faster,
        "load": lambda cost: number(cost.load, 1),
    }
    return table_of(title, columns, costs, caption="time to the first token of a second turn, in turns")


def _prompt(engine: SyncTargetEngine, turn: Turn, drawn: random.Random, number: int) -> list[int]:
    """The prompt of a second turn, whose first one the engine has answered."""
    size = engine.info.vocab_size

    def tokens(count: int) -> list[int]:
        return [drawn.randrange(size) for _ in range(count)]

    name, told = f"first {number}", tokens(turn.num_before)
    before, held = len(told), 0
    while len(told) < before + turn.num_answer:
        verdict = _verify(engine, name, told, num_prompt=before, held=held)
        assert verdict.next_token_id is not None
        held = len(told)
        told.append(verdict.next_token_id)
    engine.release([name])
    return [*told, *tokens(turn.num_message)]


def _verify(
    engine: SyncTargetEngine,
    name: str,
    token_ids: Sequence[int],
    *,
    salt: str = "",
    num_prompt: int | None = None,
    held: int = 0,
) -> Verdict:
    count = len(token_ids) if num_prompt is None else num_prompt
    sampling = SamplingParams(temperature=0.0, num_prompt_tokens=count, cache_salt=salt)
    item = VerifyItem(name, 1, held, tuple(token_ids[held:]), sampling=None if held else sampling)
    [reply] = engine.verify([item]).replies
    if not isinstance(reply, Verdict):
        raise SpecrayError(f"the target answered {reply}")
    return reply
