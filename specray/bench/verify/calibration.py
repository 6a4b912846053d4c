"""A test of whether sampled tokens are draws from the distributions that they should come from, by bets.

A gambler bets on every sampled token, at odds from the target's own distribution at its place. Where tokens
are drawn from just those distributions, the odds are fair: his wealth is 1 on average, whatever he bets on
and however each token depends on those before it, and it ends at W or more with a chance of at most 1 / W
(Ville's inequality). Where draws are biased, the wealth of who bets on the bias grows exponentially with the
number of tokens, by about 1/2 N (shift of the mean / standard deviation)^2 in its logarithm.

All gamblers start with an equal share. Each bets that one value of tokens, such as their logprob, weighs
more, or less, than it should: that a token has probability times e^(strength * value), and pays that factor
over its mean.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_LIKELY: Final = 20
"""Likeliest tokens of a place that are told apart; the others count as one."""
NUM_RECENT: Final = 24
"""Tokens before a place that count as recent."""
STRENGTHS: Final = tuple(sign * 2.0**power for power in range(-6, 4) for sign in (1, -1))
"""Factors of a value in a bet's exponent. Weaker bets would see what bfloat16 does to a distribution."""


@dataclass(frozen=True, slots=True)
class ScoredOutput:
    """Prompt and output, with the target's own distribution at the places of the output."""

    token_ids: tuple[int, ...]
    likely: tuple[Mapping[int, float], ...]
    """Logprobs of the likeliest tokens, likeliest first, at each of the last ``len(likely)`` places; which
    tokens they are must not depend on the token that came there."""


@dataclass(frozen=True, slots=True)
class Calibration:
    num_tokens: int
    p_value: float
    """Chance, at most, of so rich a gambler where tokens are drawn as they should."""
    finding: str
    """What the richest gambler has bet on."""
    seen: float
    """Mean of the value that he bet on, over the tokens that came."""
    expected: float
    """Mean of that value over the target's distributions."""


class _Place(NamedTuple):
    """What is known of a place before its token comes."""

    logprobs: Mapping[int, float]
    recent: frozenset[int]
    follower: int | None
    """Token that followed the last one where it stood before; None: it is new."""
    surpluses: Sequence[float]
    """How much more often than due each likely token came at earlier places, as a logarithm."""


class _Bet(NamedTuple):
    name: str
    values: Callable[[_Place], list[float]]
    """A value for each of the likeliest tokens of a place; the others have ``rest``'s."""
    rest: Callable[[list[float]], float]


def _nothing(_: list[float]) -> float:
    return 0.0


_BETS: Final = (
    _Bet(
        "likely tokens",
        # Value that a less likely token has in a bet on logprobs, so that no rare token decides alone.
        lambda place: [max(logprob, -10.0) for logprob in place.logprobs.values()],
        lambda values: values[-1],
    ),
    _Bet(
        "the likeliest token",
        lambda place: [float(rank == 0) for rank in range(len(place.logprobs))],
        _nothing,
    ),
    _Bet(f"the {NUM_LIKELY} likeliest tokens", lambda place: [1.0] * len(place.logprobs), _nothing),
    _Bet(
        "what followed the last token before",
        lambda place: [float(token_id == place.follower) for token_id in place.logprobs],
        _nothing,
    ),
    _Bet(
        f"tokens of the last {NUM_RECENT}",
        lambda place: [float(token_id in place.recent) for token_id in place.logprobs],
        _nothing,
    ),
    _Bet("tokens with a surplus before", lambda place: [*place.surpluses], _nothing),
)


class _Tally:
    def __init__(self) -> None:
        self._seen, self._due = Counter[int](), defaultdict[int, float](float)

    def surpluses(self, token_ids: Iterable[int]) -> list[float]:
        """Logarithms of seen over due; one of both is added, so that a rare token says little."""
        return [math.log((self._seen[token_id] + 1) / (self._due[token_id] + 1)) for token_id in token_ids]

    def add(self, logprobs: Mapping[int, float], token_id: int) -> None:
        """Counts a place."""
        for likely, logprob in logprobs.items():
            self._due[likely] += math.exp(logprob)
        if token_id in logprobs:
            self._seen[token_id] += 1


def calibrate(outputs: Iterable[ScoredOutput]) -> Calibration:
    """Bets on every place of outputs that were drawn with noise of their own."""
    places, columns, tally = list[_Place](), list[int](), _Tally()
    for output in outputs:
        for place, token_id in _places(output, tally):
            listed = list(place.logprobs)
            places.append(place)
            columns.append(listed.index(token_id) if token_id in place.logprobs else NUM_LIKELY)
    if not places:
        return Calibration(0, 1.0, "", 0.0, 0.0)
    probs, chosen = _probs(places), np.array(columns)
    values = [_values(bet, places) for bet in _BETS]
    logs = np.array(
        [[_log_wealth(probs, each, chosen, strength) for strength in STRENGTHS] for each in values]
    )
    largest = float(logs.max())
    log_wealth = largest + math.log(float(np.exp(logs - largest).mean()))
    richest, strength = np.unravel_index(int(logs.argmax()), logs.shape)
    direction = "too often" if STRENGTHS[int(strength)] > 0 else "too seldom"
    own = values[int(richest)]
    return Calibration(
        len(places),
        math.exp(-max(0.0, log_wealth)),
        f"{_BETS[int(richest)].name} {direction}",
        float(own[np.arange(len(own)), chosen].mean()),
        float((probs * own).sum(1).mean()),
    )


def _places(output: ScoredOutput, tally: _Tally) -> Iterable[tuple[_Place, int]]:
    token_ids, followers = output.token_ids, dict[int, int]()
    first = len(token_ids) - len(output.likely)
    for index, token_id in enumerate(token_ids):
        if index >= first:
            recent = frozenset(token_ids[max(0, index - NUM_RECENT) : index])
            follower = followers.get(token_ids[index - 1]) if index else None
            likely = output.likely[index - first]
            yield _Place(likely, recent, follower, tally.surpluses(likely)), token_id
            tally.add(likely, token_id)
        if index:
            followers[token_ids[index - 1]] = token_id


def _probs(places: Sequence[_Place]) -> NDArray[np.float64]:
    """Probabilities ``[number of places, NUM_LIKELY + 1]``; the last column is that of all other tokens."""
    probs = np.zeros((len(places), NUM_LIKELY + 1))
    for row, place in zip(probs, places, strict=True):
        row[: len(place.logprobs)] = np.exp(list(place.logprobs.values()))
    probs[:, -1] = np.maximum(0.0, 1.0 - probs.sum(1))
    return probs


def _values(bet: _Bet, places: Sequence[_Place]) -> NDArray[np.float64]:
    values = np.zeros((len(places), NUM_LIKELY + 1))
    for row, place in zip(values, places, strict=True):
        listed = bet.values(place)
        row[: len(listed)] = listed
        row[-1] = bet.rest(listed)
    return values


def _log_wealth(
    probs: NDArray[np.float64], values: NDArray[np.float64], chosen: NDArray[np.int64], strength: float
) -> float:
    """Logarithm of what 1 has become by a bet on each token."""
    exponents = strength * values
    largest = np.where(probs > 0.0, exponents, -np.inf).max(1)
    # What has no probability may lie far above; it adds nothing.
    means = (probs * np.exp(np.minimum(exponents - largest[:, None], 0.0))).sum(1)
    return float((exponents[np.arange(len(chosen)), chosen] - largest - np.log(means)).sum())
