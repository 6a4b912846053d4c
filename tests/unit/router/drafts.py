"""Drafts that propose what no engine of today would, and predictions that are not quite the output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from specray.draft_tokens import DraftTokens
from specray.fakes import FakeDraft, ToyModel
from specray.fakes.models import ToyGuesser
from specray.requests import GenerateRequest
from tests.unit.router.harness import DRAFT_STEP_S

EDITS = ("equal", "edited", "shifted", "halved", "unrelated", "wrong")


class TreeDraft(FakeDraft):
    """Proposes random trees, no deeper than asked: after each node one of its guesser's first guesses."""

    def __init__(self, guesser: ToyGuesser, seed: int, *, max_nodes: int = 12) -> None:
        super().__init__(guesser, cost=lambda steps: int(steps * DRAFT_STEP_S * 1e9))
        self._rng = random.Random(seed)
        self._max_nodes = max_nodes

    def _proposed(self, tokens: Sequence[int], length: int, noise_key: int) -> DraftTokens:
        draft = DraftTokens()
        for _ in range(self._rng.randint(0, self._max_nodes)):
            parent = self._rng.randrange(-1, len(draft))
            path = [draft.token_ids[node] for node in draft.path(parent)]
            if len(path) < length:
                guess = self._rng.choice(self.guesser.ranked([*tokens, *path], noise_key, 2))
                parents = draft.parents or tuple(range(-1, len(draft) - 1))
                draft = DraftTokens((*draft.token_ids, guess), (*parents, parent))
        return draft


class PaddedGuesser:
    """Right where the target's token is one that it has; every eighth time it says one of its own padding."""

    def __init__(self, model: ToyModel, num_ids: int) -> None:
        self._model, self._num_ids = model, num_ids

    def ranked(self, tokens: Sequence[int], seed: int, count: int) -> tuple[int, ...]:
        best = self._model.ranked(tokens, seed, count)
        if best[0] % 8 == 0:
            return (self._num_ids - 1, *best[: count - 1])
        return tuple(token for token in best if token < self._num_ids)


def predicting(given: GenerateRequest, output: tuple[int, ...], how: str) -> GenerateRequest:
    """The request with a prediction of its output."""
    match how:
        case "edited":
            # Replaced, inserted and deleted.
            output = (*output[:5], 63, *output[6:9], 62, 61, *output[9:14], *output[17:])
        case "shifted":
            output = (60, 59, 58, *output)
        case "halved":
            output = output[: len(output) // 2]
        case "unrelated":
            output = ToyModel(salt=99).generate((1,), max(4, len(output)))
        case "wrong":
            output = tuple((token + 1) % 64 for token in output)
    return replace(given, speculation=replace(given.speculation, prediction=output))
