"""Medusa heads: each draws one token further ahead from what the target's head read, without any state.

Head k turns the last hidden state into logits of the token k + 1 places behind the one that the target has
just drawn. No head knows what another drew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from specray.engine.attention.sdpa import sequence_slots
from specray.engine.features.base import Context, FeatureStore, TargetParts, TargetShape, TokenRows
from specray.engine.features.files import DrafterFiles
from specray.engine.model.linear import Linear

_PREFIX = re.compile(r"^(model\.)?(medusa_heads?\.)?")
_LISTED = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_LISTED_HEAD = re.compile(r"^lm_heads\.(\d+)\.weight$")
_BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.weight$")

Block = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias."""


@dataclass(frozen=True, slots=True)
class MedusaLayout:
    """A Medusa checkpoint that fits the target."""

    path: str
    feature_layers: tuple[int, ...]
    hidden_size: int
    heads: tuple[tuple[Block, ...], ...]
    """Residual blocks of each head."""
    outputs: tuple[torch.Tensor | None, ...]
    """Weight behind the blocks of each head; None: the target's own head."""

    def bytes_per_token(self, item_bytes: int) -> int:
        """Bytes of features that one token takes."""
        return item_bytes * self.hidden_size

    @property
    def num_weights(self) -> int:
        """Numbers of the tensors that are held."""
        blocks = sum(weight.numel() for head in self.heads for weight, _ in head)
        return blocks + sum(weight.numel() for weight in self.outputs if weight is not None)


def is_medusa(files: DrafterFiles) -> bool:
    """Whether the tensors are those of Medusa heads, under whichever names."""
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
    return MedusaLayout(files.path, (target.num_layers + 1,), hidden, tuple(heads), tuple(outputs))


def _count(files: DrafterFiles, pattern: str) -> int:
    number = 0
    while files.has(pattern.format(number)):
        number += 1
    return number


class MedusaDrafter:
    """Implements ``base.FeatureDrafter``.

    Args:
        layout: the checkpoint.
        parts: what is the target's.
    """

    def __init__(self, layout: MedusaLayout, parts: TargetParts) -> None:
        self.feature_layers = layout.feature_layers
        self.feature_size = layout.hidden_size
        self.max_draft_tokens: int | None = len(layout.heads)
        self.token_ids: NDArray[np.int64] | None = None
        self._parts = parts
        self._heads = [[self._linear(*block) for block in head] for head in layout.heads]
        self._outputs: list[TokenRows] = [
            parts.logits if weight is None else self._linear(weight, None).precise
            for weight in layout.outputs
        ]
        self._hidden = torch.empty(0)
        """What the target's head read last, of each sequence that goes on."""
        self._next = 0
        """Head that draws next."""

    def fuse(self, features: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """See ``base.FeatureDrafter``."""
        return features[self.feature_layers[0]].to(self._parts.dtype)

    def start(self, store: FeatureStore, contexts: Sequence[Context]) -> torch.Tensor:
        """See ``base.FeatureDrafter``."""
        rows = []
        for context in contexts:
            # The last token is drawn: the target has computed those before it.
            end = len(context.token_ids) - 1
            slots = sequence_slots(context.block_ids, end - 1, end, store.block_size, self._parts.device)
            rows.append(store.rows[slots])
        self._hidden, self._next = torch.cat(rows), 0
        return self._draw()

    def advance(self, kept: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """See ``base.FeatureDrafter``."""
        self._hidden = self._hidden[torch.tensor(kept, device=self._hidden.device)]
        return self._draw()

    def _draw(self) -> torch.Tensor:
        hidden = self._hidden
        for linear in self._heads[self._next]:
            hidden = hidden + F.silu(linear(hidden))
        output, self._next = self._outputs[self._next], self._next + 1
        return output(hidden)

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        given = None if bias is None else self._cast(bias)
        return self._parts.operators.linear(self._cast(weight), given)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._parts.device, dtype=self._parts.dtype).contiguous()
