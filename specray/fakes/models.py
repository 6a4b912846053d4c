"""Toy language model, and guessers of known quality that act as its draft."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from specray.draft_tokens import DraftTokens, TreeBudget

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(tokens: Sequence[int], salt: int) -> int:
    """Hashes tokens, their order and the salt to 63 bits; the same on every machine."""
    value = (zlib.crc32(array("I", tokens).tobytes()) + len(tokens) + salt * _GOLDEN) & _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return (value ^ (value >> 31)) >> 1


@dataclass(frozen=True, slots=True)
class ToyModel:
    """Maps each prefix to a ranking of the vocabulary; the first is the next token.

    The ranking depends on every earlier token, so a wrong or missing one anywhere changes the output; or on
    the last ``context_len`` tokens only, so that the output soon repeats itself.
    """

    vocab_size: int = 64
    salt: int = 0
    context_len: int | None = None

    def ranked(self, tokens: Sequence[int], seed: int, count: int) -> tuple[int, ...]:
        """The ``count`` likeliest next tokens (at most vocab_size), likeliest first."""
        first = self.next_token(tokens, seed)
        end = first + min(count, self.vocab_size)
        return (*range(first, min(end, self.vocab_size)), *range(end - self.vocab_size))

    def next_token(self, tokens: Sequence[int], seed: int) -> int:
        """The model's next token after ``tokens``."""
        known = tokens if self.context_len is None else tokens[-self.context_len :]
        return _mix(known, self.salt * 1_000_003 + seed) % self.vocab_size

    def generate(self, prompt: Sequence[int], num_tokens: int, seed: int = 0) -> tuple[int, ...]:
        """Output of the model alone, the reference of every test of speculation."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self.next_token(tokens, seed))
        return tuple(tokens[len(prompt) :])


class ToyGuesser(Protocol):
    """Guesses next tokens for a fake draft."""

    def ranked(self, tokens: Sequence[int], seed: int, count: int) -> tuple[int, ...]:
        """Returns at most ``count`` different next tokens, likeliest first; empty: no guess."""
        ...


@dataclass(frozen=True, slots=True)
class PerfectGuesser:
    """A guesser that is always right."""

    model: ToyModel

    def ranked(self, tokens: Sequence[int], seed: int, count: int) -> tuple[int, ...]:
        return self.model.ranked(tokens, seed, count)


@dataclass(frozen=True, slots=True)
class RandomGuesser:
    """A guesser of random tokens."""

    model: ToyModel
    salt: int = 77

    def ranked(self, tokens: Sequence[int], seed: int, count: int) -> tuple[int, ...]:
        other = ToyModel(vocab_size=self.model.vocab_size, salt=self.salt)
        return other.ranked(tokens, seed, count)


@dataclass(frozen=True, slots=True)
class AdversarialGuesser:
    """A guesser that is never right."""

    model: ToyModel

    def ranked(self, tokens: Sequence[int], seed: int, count: int) -> tuple[int, ...]:
        return self.model.ranked(tokens, seed, 1 + count)[1:]


@dataclass(frozen=True, slots=True)
class EmptyGuesser:
    """A guesser without guesses."""

    def ranked(self, tokens: Sequence[int], seed: int, count: int) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class NoisyGuesser:
    """A guesser that is right with probability ``agreement`` at each position, else in its second guess."""

    model: ToyModel
    agreement: float = 0.6
    salt: int = 5

    def ranked(self, tokens: Sequence[int], seed: int, count: int) -> tuple[int, ...]:
        best = self.model.ranked(tokens, seed, max(2, count))
        is_right = _mix(tokens, self.salt * 7_919 + seed) % 10_000 < self.agreement * 10_000
        ranking = best if is_right else (best[1], best[0], *best[2:])
        return ranking[:count]


def guessed_tree(
    guesser: ToyGuesser, prefix: Sequence[int], budget: TreeBudget, depth: int, noise_key: int
) -> DraftTokens:
    """The nodes of the best guesses: a second guess is worth as much as three further first ones."""
    widths = budget.widths or (budget.num_nodes,) * depth
    token_ids: list[int] = []
    parents: list[int] = []
    open_nodes: list[tuple[int, int, tuple[int, ...]]] = []

    def push(cost: int, parent: int, path: tuple[int, ...]) -> None:
        if len(path) < min(depth, len(widths)):
            guesses = guesser.ranked([*prefix, *path], noise_key, widths[len(path)])
            for rank, guess in enumerate(guesses):
                heappush(open_nodes, (cost + 1 + 3 * rank, parent, (*path, guess)))

    push(0, -1, ())
    while open_nodes and len(token_ids) < budget.num_nodes:
        cost, parent, path = heappop(open_nodes)
        token_ids.append(path[-1])
        parents.append(parent)
        push(cost, len(token_ids) - 1, path)
    return DraftTokens(tuple(token_ids), tuple(parents))


def guessed(guesser: ToyGuesser, prefix: Sequence[int], length: int, noise_key: int) -> tuple[int, ...]:
    """First guesses, one after the other; fewer where there is none."""
    tokens = list(prefix)
    for _ in range(length):
        guess = guesser.ranked(tokens, noise_key, 1)
        if not guess:
            break
        tokens.append(guess[0])
    return tuple(tokens[len(prefix) :])
