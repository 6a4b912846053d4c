"""Medusa heads: each draws one token further ahead from what the target's head read, without any state.

Head k turns the last hidden state into logits of the token k + 1 places after the one that the target has
just drawn. No head knows what another drew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specray.engine.attention.sdpa import sequence_slots
from specray.engine.features.base import (
    Context,
    Continued,
    FeatureDrafter,
    FeatureStore,
    LastHidden,
    TargetParts,
    TargetShape,
    TokenRows,
)
from specray.engine.features.files import DrafterFiles
from specray.engine.features.layout import DrafterLayout
from specray.engine.features.shared_rows import SharedRows, for_each_row
from specray.engine.model.linear import Linear

_PREFIX = re.compile(r"^(model\.)?(medusa_heads?\.)?")
_LISTED = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_LISTED_HEAD = re.compile(r"^lm_heads\.(\d+)\.weight$")
_BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.weight$")

RANK_ACCEPTANCE = "medusa_rank_acceptance"
"""Key of the configuration for what training has measured: of each head, the chance of each rank."""

Block = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaLayout(DrafterLayout):
    """A Medusa checkpoint."""

    heads: tuple[tuple[Block, ...], ...]
    """Residual blocks of each head."""
    outputs: tuple[torch.Tensor | None, ...]
    """Weight after the blocks of each head; None: the target's own head."""
    rank_acceptance: tuple[tuple[float, ...], ...] = ()
    """Measured chance of each rank, by head; empty: none was measured."""

    @property
    def num_weights(self) -> int:
        blocks = sum(weight.numel() for head in self.heads for weight, _ in head)
        return blocks + sum(weight.numel() for weight in self.outputs if weight is not None)

    @property
    def reads_head(self) -> bool:
        return any(weight is None for weight in self.outputs)

    @property
    def one_pass_kind(self) -> str | None:
        return "a Medusa drafter"


def is_medusa(files: DrafterFiles) -> bool:
    return any(_BLOCK.match(_canonical(name)) for name in files.tensors)


def _canonical(name: str) -> str:
    """The authors' name: ``{head}.{layer}.linear.weight``, and ``{head}.{number of layers}.weight``."""
    name = _PREFIX.sub("", name)
    if (match := _LISTED.match(name)) is not None:
        return f"{match[1]}.{match[2]}.linear.{match[3]}"
    return f"{match[1]}.head.weight" if (match := _LISTED_HEAD.match(name)) is not None else name


def read_medusa(files: DrafterFiles, target: TargetShape) -> MedusaLayout:
    """Reads Medusa heads as their authors write them, as TGI does in both of its versions, or vLLM.

    Heads and blocks are counted by their tensors: configurations often say another number.

    Raises:
        ConfigError: names the tensor that does not fit the layout or the target, and what would.
    """
    files.rename(_canonical)
    hidden, vocab_size = target.hidden_size, target.vocab_size
    num_heads = _count(files, "{}.0.linear.weight")
    if num_heads == 0:
        raise files.refuse("0.0.linear.weight is missing; allowed: heads from 0 on")
    heads, outputs = [], []
    for index in range(num_heads):
        num_blocks = _count(files, f"{index}.{{}}.linear.weight")
        names = [f"{index}.{block}.linear" for block in range(num_blocks)]
        heads.append(
            tuple(
                (files.take(f"{name}.weight", hidden, hidden), files.take_if_there(f"{name}.bias", hidden))
                for name in names
            )
        )
        own = [f"{index}.{num_blocks}.weight", f"{index}.head.weight"]
        found = next((name for name in own if files.has(name)), None)
        outputs.append(None if found is None else files.take(found, vocab_size, hidden))
    files.check_all_taken("Medusa")
    return MedusaLayout(
        path=files.path,
        feature_layers=(target.num_layers + 1,),
        hidden_size=hidden,
        heads=tuple(heads),
        outputs=tuple(outputs),
        rank_acceptance=_rank_acceptance(files, num_heads),
    )


def _rank_acceptance(files: DrafterFiles, num_heads: int) -> tuple[tuple[float, ...], ...]:
    found = files.config.get(RANK_ACCEPTANCE)
    if found is None:
        return ()
    is_table = isinstance(found, list) and len(found) == num_heads and all(map(_are_chances, found))
    if not is_table:
        raise files.refuse(
            f"{RANK_ACCEPTANCE} is {found!r}; allowed: a list of chances above 0 and up to 1, by rank, for "
            f"each of {num_heads} heads"
        )
    return tuple(tuple(map(float, row)) for row in found)


def _are_chances(row: object) -> bool:
    return (
        isinstance(row, list)
        and len(row) > 0
        and all(isinstance(each, int | float) and 0.0 < each <= 1.0 for each in row)
    )


def _count(files: DrafterFiles, pattern: str) -> int:
    number = 0
    while files.has(pattern.format(number)):
        number += 1
    return number


class MedusaDrafter(FeatureDrafter):
    """A drafter with Medusa heads.

    Args:
        layout: the checkpoint.
        parts: what is the target's.
    """

    keeps_state = False

    def __init__(self, layout: MedusaLayout, parts: TargetParts) -> None:
        super().__init__(LastHidden(layout, parts))
        self.max_draft_tokens = len(layout.heads)
        self.rank_acceptance = layout.rank_acceptance
        self._parts = parts
        self._heads = [[self._linear(*block) for block in head] for head in layout.heads]
        self._outputs: list[TokenRows] = [
            parts.logits if weight is None else self._linear(weight, None).precise
            for weight in layout.outputs
        ]
        self._hidden = torch.empty(0)
        """What the target's head read last, of each sequence."""
        self._shared = SharedRows()

    def start(self, store: FeatureStore, contexts: Sequence[Context]) -> torch.Tensor:
        rows = []
        for context in contexts:
            # The last token is drawn: the target has computed those before it.
            end = len(context.token_ids) - 1
            slots = sequence_slots(context.block_ids, end - 1, end, store.block_size, self._parts.device)
            rows.append(store.rows[slots])
        self._hidden = torch.cat(rows)
        self._shared.begin(len(contexts))
        return self._draw(self._hidden)

    def read(self, store: FeatureStore, context: Context) -> None:
        """There is no state."""

    def advance(self, continued: Sequence[Continued]) -> torch.Tensor:
        """All rows of a sequence have the same logits."""
        own = torch.tensor(self._shared.advance(continued), device=self._hidden.device)
        return for_each_row(self._draw(self._hidden[own]), continued)

    def _draw(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self._shared.depth
        for linear in self._heads[head]:
            hidden = hidden + F.silu(linear(hidden))
        return self._outputs[head](hidden)

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        given = None if bias is None else self._cast(bias)
        return self._parts.operators.linear(self._cast(weight), given)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._parts.device, dtype=self._parts.dtype).contiguous()
