"""Toy drafts that read other tokens than the target writes: another vocabulary, or a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from specray.engine.draft_view.engine import DraftViewEngine, RetokenizingDraftEngine
from specray.engine.draft_view.sampler import partner_sampler
from specray.engine.window import DraftWindow
from tests.unit.engine.harness import CLOSE, CPU, VOCAB_SIZE, SlotRunner, engine_info, model_logits

ALONE = (0, 7, 14, 19)
"""The target's tokens that are two of the draft's."""
NAMES = tuple((5 * token_id + 2) % VOCAB_SIZE for token_id in range(VOCAB_SIZE))
"""The draft's token of the same text, or the second of two."""
MARK = NAMES[0]
"""The first of two."""


class ToyVocabulary:
    """Implements ``reading.Vocabulary``: the target's tokens by other numbers, and some in two pieces."""

    draft_ids: ClassVar = {
        token_id: NAMES[token_id] for token_id in range(VOCAB_SIZE) if token_id not in ALONE
    }

    begin: tuple[int, ...] = ()

    def read(self, token_id: int) -> tuple[int, ...]:
        own = NAMES[token_id]
        return (MARK, own) if token_id in ALONE else (own,)

    def write(self, draft_ids: Sequence[int], behind: Sequence[int] = ()) -> tuple[int, ...]:
        written, is_marked = [], False
        for own in draft_ids:
            token_id = NAMES.index(own)
            if own == MARK and not is_marked:
                is_marked = True
                continue
            is_marked = False
            written.append(token_id)
        return tuple(written)


class BeginningVocabulary(ToyVocabulary):
    """A draft that begins each text with a token, which the target's token 5 is, too."""

    begin = (NAMES[5],)


class TranslatingRunner(SlotRunner):
    """A draft that knows what the table says, in its own vocabulary."""

    def logits_of(self, prefix: Sequence[int]) -> Tensor:
        vocabulary = ToyVocabulary()
        told = vocabulary.write(prefix)
        row, own = model_logits(self._rows, told), torch.full((VOCAB_SIZE,), -30.0)
        if _is_open(prefix):
            own[[NAMES[token_id] for token_id in ALONE]] = row[list(ALONE)]
        else:
            for token_id, name in vocabulary.draft_ids.items():
                own[name] = row[token_id]
            own[MARK] = row[list(ALONE)].max()
        return own


def _is_open(prefix: Sequence[int]) -> bool:
    """Whether the last token is the first of two."""
    is_marked = False
    for own in prefix:
        is_marked = own == MARK and not is_marked
    return is_marked


def toy_viewer(
    mode: Literal["same", "intersect", "retokenize"] = "same",
    rows: Tensor = CLOSE,
    *,
    window: int | None = None,
    **changes: int,
) -> tuple[DraftViewEngine, SlotRunner]:
    """A draft over a table of logits in the target's vocabulary."""
    told = engine_info("draft", **changes)
    runner = SlotRunner(rows, told) if mode == "same" else TranslatingRunner(rows, told)
    sampler = None
    if mode == "intersect":
        sampler = partner_sampler(ToyVocabulary.draft_ids, CPU, vocab_size=VOCAB_SIZE, max_num_draft_probs=64)
    make = RetokenizingDraftEngine if mode == "retokenize" else DraftViewEngine
    engine = make(
        runner,
        told,
        router_info=told,
        device=CPU,
        vocabulary=None if mode == "same" else ToyVocabulary(),
        window=None if window is None else DraftWindow(window),
        sampler=sampler,
    )
    return engine, runner
