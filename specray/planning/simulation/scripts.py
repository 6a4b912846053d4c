"""Scripts of requests: the tokens that simulated engines produce and propose.

Neither engine has a model, so both read the same *script* of a request. With measured outputs the script is
one of these, token by token: proposals are right where the draft's were, end where the draft ended them, and
a proposer that looks for repetitions finds those of the output. Without measured outputs, draft tokens are
right with the measured acceptance rates.
"""

from __future__ import annotations

import math
import random
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, Protocol

from specray.draft_tokens import DraftTokens
from specray.planning.profile import LENGTH_DIGITS, AcceptanceProfile, MeasuredOutput, ProposalLengths
from specray.types import Branch, SpeculateItem

GUESS: Final = 1
"""The draft's first choice, where there are no outputs."""
WRONG: Final = 0
"""A token that no output has."""
MISSES_BY_WIDTH: Final = (1.0, 0.5, 0.3)
"""Share of the first guess's misses that 1, 2 or 3 branches miss, where hits were not measured. Taken from
the embedded pair."""
MAX_RANK: Final = len(MISSES_BY_WIDTH)
VOCAB_SIZE: Final = 1 << 31
"""Vocabulary size of simulated engines: tokens are numbers without end."""
_FIRST_UNKNOWN: Final = 1 << 30
"""First of the tokens that come only once, in prompts that are longer than the measured ones."""


class Script(Protocol):
    """The script of one request. A position counts the output tokens before it."""

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Returns a prompt of this many tokens."""
        ...

    def proposal(self, position: int, num_tokens: int, min_acceptance: float) -> tuple[int, ...]:
        """Returns the draft's proposal at a position, at most ``num_tokens``."""
        ...

    def branches(self, position: int, item: SpeculateItem) -> tuple[Branch, ...]:
        """Returns the draft's answer to a fan-out at a position."""
        ...

    def verdict(self, rng: random.Random, position: int, drafts: Sequence[int]) -> tuple[int, int]:
        """Returns (accepted tokens, next token) of a round that begins at a position."""
        ...


class DrawnScript:
    """A script whose draft tokens are right with the rate of their place in the round.

    Tokens stand for ranks: every draft token is ``GUESS``; the token after the accepted ones is the rank at
    which the draft would have listed it (``GUESS`` is the first), so branches are hit as often as was
    measured.
    """

    def __init__(self, acceptance: AcceptanceProfile | None) -> None:
        self._rates = (0.0,) if acceptance is None else acceptance.by_position
        self._rank_shares = rank_shares(acceptance)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return (WRONG,) * num_tokens

    def proposal(self, position: int, num_tokens: int, min_acceptance: float) -> tuple[int, ...]:
        return (GUESS,) * num_tokens

    def branches(self, position: int, item: SpeculateItem) -> tuple[Branch, ...]:
        tokens = (GUESS,) * item.num_speculative_tokens
        return tuple(Branch(accepted, rank, DraftTokens(tokens)) for accepted, rank in _places(item))

    def verdict(self, rng: random.Random, position: int, drafts: Sequence[int]) -> tuple[int, int]:
        for index in range(len(drafts) + 1):
            if rng.random() >= self._rates[min(index, len(self._rates) - 1)]:
                return index, _rank(rng.random(), self._rank_shares)
        # The draft's next guess is right as often as a further draft token.
        return len(drafts), GUESS


class ReplayedScript:
    """A script that repeats one measured output.

    After its end it begins again, with other tokens, so that nothing seems repeated.

    Args:
        output: the measured output.
        acceptance: the measurement it belongs to.
        name: name of the request; draws differ by it.
    """

    def __init__(self, output: MeasuredOutput, acceptance: AcceptanceProfile, name: str) -> None:
        self._output = output
        self._rank_shares = rank_shares(acceptance)
        self._name = name
        self._span = max(*output.prompt, *output.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._output.prompt)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Returns the end of the measured prompt; before that, tokens that come once."""
        known = self._output.prompt[-num_tokens:]
        unknown = range(_FIRST_UNKNOWN, _FIRST_UNKNOWN + num_tokens - len(known))
        return (*unknown, *known)

    def proposal(self, position: int, num_tokens: int, min_acceptance: float) -> tuple[int, ...]:
        return self._chain(position, min(num_tokens, self._longest(position, min_acceptance)))

    def branches(self, position: int, item: SpeculateItem) -> tuple[Branch, ...]:
        proposed = item.proposed_token_ids
        return tuple(
            self._branch(position, accepted, rank, item.num_speculative_tokens, proposed)
            for accepted, rank in _places(item)
        )

    def verdict(self, rng: random.Random, position: int, drafts: Sequence[int]) -> tuple[int, int]:
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == self._token(position + accepted):
            accepted += 1
        return accepted, self._token(position + accepted)

    def _token(self, position: int) -> int:
        repeats, place = divmod(position, len(self._output.tokens))
        return self._output.tokens[place] + repeats * self._span

    def _agrees(self, position: int) -> bool:
        return self._output.agreements[position % len(self._output.agreements)] == "1"

    def _chain(self, position: int, num_tokens: int) -> tuple[int, ...]:
        """Returns draft tokens after the output so far; after a wrong one all are wrong."""
        tokens: list[int] = []
        while len(tokens) < num_tokens and self._agrees(position + len(tokens)):
            tokens.append(self._token(position + len(tokens)))
        return (*tokens, *(WRONG,) * (num_tokens - len(tokens)))

    def _longest(self, position: int, min_acceptance: float) -> int:
        lengths = self._output.lengths
        if not lengths or min_acceptance <= 0:
            return len(LENGTH_DIGITS)
        index = bisect_left(lengths, min_acceptance, key=lambda one: one.min_acceptance)
        if index in (0, len(lengths)):
            return self._length(lengths[min(index, len(lengths) - 1)], position)
        lower, upper = lengths[index - 1], lengths[index]
        # Bounds are products of probabilities: halfway is their geometric mean.
        share = math.log(min_acceptance / lower.min_acceptance) / math.log(
            upper.min_acceptance / lower.min_acceptance
        )
        longer = self._length(lower, position)
        return round(longer + share * (self._length(upper, position) - longer))

    def _length(self, lengths: ProposalLengths, position: int) -> int:
        return LENGTH_DIGITS.index(lengths.by_position[position % len(lengths.by_position)])

    def _branch(
        self, position: int, accepted: int, rank: int, num_tokens: int, proposed: Sequence[int]
    ) -> Branch:
        place = position + accepted
        is_possible = all(
            token == self._token(position + index) for index, token in enumerate(proposed[:accepted])
        )
        if not is_possible or rank != self._rank_of(place, is_last=accepted == len(proposed)):
            return Branch(accepted, _FIRST_UNKNOWN + rank, DraftTokens((WRONG,) * num_tokens))
        return Branch(accepted, self._token(place), DraftTokens(self._chain(place + 1, num_tokens)))

    def _rank_of(self, place: int, *, is_last: bool) -> int:
        if is_last and self._agrees(place):
            return GUESS
        return _rank(zlib.crc32(f"{self._name}-{place}".encode()) / (1 << 32), self._rank_shares)


class Scripts:
    """The scripts of all requests in a run.

    Args:
        acceptance: quality of the draft; None: there is no draft.
        seed: seed of the choice of outputs.
        is_in_order: requests take the measured outputs in turns.
    """

    def __init__(
        self, acceptance: AcceptanceProfile | None, *, seed: int = 0, is_in_order: bool = False
    ) -> None:
        self._acceptance = acceptance
        self._seed = seed
        self._is_in_order = is_in_order
        self._drawn = DrawnScript(acceptance)
        self._of: dict[str, Script] = {}

    @property
    def outputs(self) -> Sequence[MeasuredOutput]:
        """The measured outputs; may be empty."""
        return () if self._acceptance is None else self._acceptance.outputs

    def of(self, request_id: str) -> Script:
        """Returns the request's script; the same for both engines."""
        acceptance, outputs = self._acceptance, self.outputs
        if acceptance is None or not outputs:
            return self._drawn
        script = self._of.get(request_id)
        if script is None:
            name = f"{self._seed}-{request_id}"
            number = len(self._of) if self._is_in_order else zlib.crc32(name.encode())
            script = ReplayedScript(outputs[number % len(outputs)], acceptance, name)
            self._of[request_id] = script
        return script


def rank_shares(acceptance: AcceptanceProfile | None) -> tuple[float, ...]:
    """Returns cumulative shares: how often the next token is among the first 1, 2 ... guesses."""
    measured = {} if acceptance is None else {one.width: one.rate for one in acceptance.hit_rates}
    rates = (0.0,) if acceptance is None else acceptance.by_position
    mean_rate = sum(rates) / len(rates)
    shares: list[float] = []
    for width in range(1, MAX_RANK + 1):
        known = measured.get(width, 1 - (1 - mean_rate) * MISSES_BY_WIDTH[width - 1])
        shares.append(max([known, *shares]))
    return tuple(shares)


def _rank(draw: float, shares: Sequence[float]) -> int:
    """Returns the rank for a draw in [0, 1); ``WRONG``: none of the ranks."""
    for rank, share in enumerate(shares, start=GUESS):
        if draw < share:
            return rank
    return WRONG


def _places(item: SpeculateItem) -> list[tuple[int, int]]:
    """Returns (accepted tokens, rank) of likely outcomes: as many ranks for each number as fit."""
    ranks = min(MAX_RANK, max(1, item.max_branches // len(item.fanout)) if item.max_branches else MAX_RANK)
    return [
        (accepted, rank)
        for accepted, most in enumerate(item.fanout)
        for rank in range(GUESS, GUESS + min(ranks, most))
    ]
