"""A draft model in training to predict all draft tokens in one forward, at masks.

An et al., *PARD*, arXiv 2504.18583. Behind the last token of a prefix stand masks, at the positions of the
tokens that they are to predict from. All prefixes of a row are trained in one forward: its tokens, and masks
after some of them. A mask sees the tokens of its prefix and the masks before it in its own chain::

    tokens           t0   t1   ...  ta   t(a+1) ...     causal, as ever
    masks after ta                       m1  m2 ...     see t0..ta and m1, m2 ... up to themselves

Of each depth but the first only some masks are computed, and none without those before it (conditional drop):
depth s retains ``keep_rate ** s`` of all prefixes, at least ``min_kept``.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from specray.errors import ConfigError
from specray.train.heads.base import DraftRows, is_range, text_section
from specray.train.heads.loading import OFFSETS

MAX_MASKS = 2048
"""Masks that are computed at once."""


class MaskChains:
    """What heads with masks do alike."""

    num_depths: int
    _mask_id: int
    _keep_rate: float
    _min_kept: float

    def trained_anchors(self, num_tokens: int, generator: torch.Generator) -> Sequence[torch.Tensor]:
        return kept_anchors(
            num_tokens - 1, self.num_depths, self._keep_rate, self._min_kept, generator=generator
        )


class PardDraft(MaskChains):
    """Implements ``base.DraftHead``; reads no features.

    Args:
        draft: the draft, a causal language model of transformers; trained in place.
        vocab_size: of the target.
        num_depths: tokens that are drafted in one forward.
        mask_id: token of the draft that stands for one to be drafted.
        keep_rate: share of the masks of a depth that the next one retains, in (0, 1].
        min_kept: least share of all prefixes that a depth retains.
        row_len: tokens of a row.
        token_ids: of the rows of its head, ascending; None: all.

    Raises:
        ConfigError: the draft has windows that are shorter than a row, takes no positions, or proposes
            token ids that the target lacks.
    """

    name = "pard"
    feature_layers: tuple[int, ...] = ()
    rank_acceptance: list[list[float]] | None = None

    def __init__(
        self,
        draft: Any,
        *,
        vocab_size: int,
        num_depths: int,
        mask_id: int,
        keep_rate: float,
        min_kept: float,
        row_len: int,
        token_ids: torch.Tensor | None = None,
    ) -> None:
        if "position_ids" not in inspect.signature(draft.forward).parameters:
            raise ConfigError(
                f"draft {draft.config.model_type!r} takes no position_ids; allowed: models that do"
            )
        window = getattr(text_section(draft.config), "sliding_window", None)
        if window is not None and window < row_len + num_depths:
            raise ConfigError(
                f"draft has a sliding_window of {window}; allowed: at least {row_len + num_depths}, a row "
                "and its masks"
            )
        self._draft = draft
        self.num_depths = num_depths
        self._mask_id = mask_id
        self._keep_rate, self._min_kept = keep_rate, min_kept
        self._is_trimmed = token_ids is not None
        if token_ids is None:
            token_ids = torch.arange(min(vocab_size, len(draft.get_output_embeddings().weight)))
        elif int(token_ids[-1]) >= vocab_size:
            raise ConfigError(f"draft proposes token id {int(token_ids[-1])}; allowed: 0..{vocab_size - 1}")
        self.draft_ids = token_ids.to(draft.device)

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._draft
        return module

    def unroll(
        self,
        features: Mapping[int, torch.Tensor],
        token_ids: torch.Tensor,
        anchors: Sequence[torch.Tensor],
    ) -> Sequence[DraftRows]:
        """The first depth is drafted by the tokens themselves."""
        parts = [self._forward(token_ids, group) for group in anchor_groups(anchors)]
        # Token q + 1 drafts what comes after it.
        found = joined_depths(parts[0][0][:, 1:], [masks for _, masks in parts], anchors[0])
        return [DraftRows(rows[..., : len(self.draft_ids)]) for rows in found]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters by name: one of those that are tied, and the ids of a trimmed head's rows."""
        own = {name: parameter.detach() for name, parameter in self._draft.named_parameters()}
        ids = self.draft_ids.cpu()
        return own | {OFFSETS: ids - torch.arange(len(ids))} if self._is_trimmed else own

    def config(self, target: str) -> dict[str, Any]:
        """The draft's own, and the mask's token."""
        own: dict[str, Any] = json.loads(self._draft.config.to_json_string())
        own.pop("_name_or_path", None)
        return {**own, "dtype": "bfloat16", "pard_token": self._mask_id}

    def _forward(
        self, token_ids: torch.Tensor, anchors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Logits of the tokens, and of the masks of each depth from 1 on, whose anchors these are."""
        num_rows, num_tokens = token_ids.shape
        counts = [len(own) for own in anchors]
        ends, depths = chain_rows(num_tokens, [own + 1 for own in anchors], token_ids.device)
        masks = token_ids.new_full((num_rows, sum(counts)), self._mask_id)
        output = self._draft(
            input_ids=torch.cat((token_ids, masks), 1),
            attention_mask=chain_mask(ends, depths, self._draft.dtype).expand(num_rows, 1, -1, -1),
            position_ids=(ends + depths)[None].expand(num_rows, -1),
            use_cache=False,
        )
        tokens, *later = torch.split(output.logits, [num_tokens, *counts], 1)
        return tokens, later


def joined_depths(
    rows: torch.Tensor, masks: Sequence[Sequence[torch.Tensor]], anchors: torch.Tensor
) -> list[torch.Tensor]:
    """Rows of each depth: the first's at its anchors, and those of masks in pieces of ``anchor_groups``."""
    first = rows[:, : len(anchors)] if is_range(anchors) else rows[:, anchors]
    return [first, *(torch.cat(pieces, 1) for pieces in zip(*masks, strict=True))]


def chain_rows(
    num_tokens: int, ends: Sequence[torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last token that each row sees and its depth, as ``chain_mask`` takes them; tokens come first.

    A token is the end of its own prefix, and a mask of the prefix that it follows.
    """
    counts = torch.tensor([num_tokens, *map(len, ends)], device=device)
    depths = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    return torch.cat((torch.arange(num_tokens, device=device), *ends)), depths


def chain_mask(ends: torch.Tensor, depths: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores of rows that are tokens or masks, ``[1, 1, size, size]``.

    Args:
        ends: ``[size]``: the last token that each row sees.
        depths: ``[size]``: 0 of a token, s of the mask number s after one.
    """
    is_token = depths == 0
    sees_token = is_token & (ends <= ends[:, None])
    sees_mask = ~is_token & (ends == ends[:, None]) & (depths <= depths[:, None])
    hidden = torch.finfo(dtype).min
    mask = torch.zeros(sees_mask.shape, dtype=dtype, device=ends.device)
    return mask.masked_fill_(~(sees_token | sees_mask), hidden)[None, None]


def kept_anchors(
    count: int, num_depths: int, keep_rate: float, min_kept: float, *, generator: torch.Generator
) -> list[torch.Tensor]:
    """Anchors of each depth: all of the first, and of each later one some of those before.

    Args:
        count: anchors of the first depth.
        keep_rate, min_kept: as ``PardDraft`` takes them.
        generator: of the CPU.
    """
    order = torch.randperm(count, generator=generator)
    found = [torch.arange(count)]
    for depth in range(1, num_depths):
        share = max(keep_rate**depth, min_kept)
        kept = order[: max(1, math.ceil(share * count))]
        found.append(kept[kept < count - depth].sort().values)
    return found


def anchor_groups(anchors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The anchors of depths from 1 on, in pieces with a bounded number of masks."""
    later = list(anchors[1:])
    num_groups = -(-sum(map(len, later)) // MAX_MASKS)
    if num_groups <= 1:
        return [later]
    ends = [int(part[-1]) for part in later[0].tensor_split(num_groups) if len(part)]
    firsts = [-1, *ends[:-1]]
    return [
        [own[(own > first) & (own <= end)] for own in later] for first, end in zip(firsts, ends, strict=True)
    ]
