"""Conversations whose turns share a beginning: what clients send, and what one cache for all would find."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from specray.prefix_keys import UNIT_TOKENS, root_key, short_keys
from specray.routing import PrefixMap

FIRST_TOKEN: Final = 10
"""First of the tokens that prompts are drawn from."""
_MAX_UNITS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class ConversationLoad:
    """Conversations, a number of them at a time.

    Attributes:
        num_conversations: in all.
        concurrency: of them at a time.
        num_turns: of each.
        num_tenants: system prompts; the conversations have them in turn.
        system_tokens: of a system prompt; 0: conversations share nothing.
        user_tokens: of what a user says in a turn.
        output_tokens: of each answer.
        vocab_size: tokens that prompts are drawn from.
    """

    num_conversations: int
    concurrency: int
    num_turns: int
    num_tenants: int
    system_tokens: int
    user_tokens: int
    output_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one turn; seconds since it was sent."""

    token_ids: tuple[int, ...]
    ttft_s: float
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn that was answered.

    Attributes:
        num_findable_tokens: prompt tokens that one cache would have had that holds everything.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_findable_tokens: int
    ttft_s: float


Ask = Callable[[str, tuple[int, ...]], Awaitable[Answer]]
"""Sends a prompt under a name that no other has, and returns at the end of its answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All turns of one run, and the seconds that it took."""

    turns: tuple[Turn, ...]
    seconds: float

    @property
    def found_share(self) -> float:
        """Found prompt tokens over those that one cache with everything would have found."""
        findable = sum(turn.num_findable_tokens for turn in self.turns)
        return sum(turn.num_cached_tokens for turn in self.turns) / findable if findable else 1.0

    @property
    def cached_share(self) -> float:
        """Found prompt tokens over all of them."""
        return sum(turn.num_cached_tokens for turn in self.turns) / sum(
            turn.num_prompt_tokens for turn in self.turns
        )

    @property
    def mean_ttft_ms(self) -> float:
        return 1e3 * fmean(turn.ttft_s for turn in self.turns)


async def converse(
    load: ConversationLoad, ask: Ask, *, seed: int = 0, now: Callable[[], float] = time.monotonic
) -> Outcome:
    """Holds all conversations; the same seed gives the same prompts, up to what is answered."""
    rng = random.Random(seed)
    everything = PrefixMap(max_units=1 << 22)
    systems = [_words(rng, load, load.system_tokens) for _ in range(load.num_tenants)]
    waiting = iter(range(load.num_conversations))
    turns: list[Turn] = []

    async def one(number: int) -> None:
        said = random.Random(f"{seed}-{number}")
        prompt = systems[number % load.num_tenants]
        for turn in range(load.num_turns):
            prompt += _words(said, load, load.user_tokens)
            keys = short_keys(root_key(), prompt[:-1], _MAX_UNITS)
            findable = everything.match("", keys) * UNIT_TOKENS
            answer = await ask(f"{number}-{turn}", prompt)
            turns.append(Turn(len(prompt), answer.num_cached_tokens, findable, answer.ttft_s))
            prompt += answer.token_ids
            everything.use("", short_keys(root_key(), prompt[:-1], _MAX_UNITS))

    async def work() -> None:
        for number in waiting:
            await one(number)

    began_s = now()
    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency):
            group.create_task(work())
    return Outcome(tuple(turns), now() - began_s)


def _words(rng: random.Random, load: ConversationLoad, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TOKEN, load.vocab_size) for _ in range(num_tokens))
