"""Guessers for drafts of tests: masks, n-grams, and smaller models that are right, close, wrong or lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specray.engine.drafting.guesses import Guesser, Masks, ModelGuesses, NgramGuesses
from tests.unit.engine.harness import CLOSE, table, toy_draft

MASK = 22
"""The mask token of the toy model."""


def model_guesses(*, error: float = 0.0, seed: int = 0, max_num_tokens: int = 3, **changes: int) -> Guesser:
    """A smaller model at some distance from the target's table."""
    return ModelGuesses(toy_draft(table(error=error, seed=seed), **changes)[0], max_num_tokens)


CASCADES: Mapping[str, Callable[[], Guesser]] = {
    "ngram": lambda: NgramGuesses(4),
    "same": lambda: ModelGuesses(toy_draft(CLOSE)[0], 4),
    "close": lambda: model_guesses(error=0.5),
    "stranger": lambda: model_guesses(seed=9),
    "lossy": lambda: model_guesses(error=0.5, max_num_seqs=1),
    "short": lambda: model_guesses(error=0.5, max_model_len=16),
}
"""Inner drafts of a cascade."""


def masks() -> Guesser:
    """What a model of PARD computes behind a chain."""
    return Masks(MASK)
