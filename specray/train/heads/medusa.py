"""Medusa heads in training: a residual block for each place ahead, before the target's own head.

Cai et al., *Medusa*, arXiv 2401.10774. All heads read what the target's head reads, and none knows what
another drafts. They begin as the target's head itself: their blocks are zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specray.train.heads.base import DraftRows, HeadModule, is_range, text_section, whole_number

RANK_ACCEPTANCE = "medusa_rank_acceptance"
"""Key of the configuration for the chance of each rank of each head, by which the engine chooses nodes."""


class MedusaHeads(HeadModule):
    """Implements ``base.DraftHead``.

    Args:
        model: the target, of transformers; its head is read and not trained.
        num_depths: number of heads.
    """

    name = "medusa"
    output: torch.Tensor
    draft_ids: torch.Tensor

    def __init__(self, model: Any, *, num_depths: int) -> None:
        super().__init__()
        section = text_section(model.config)
        hidden = whole_number(section, "hidden_size")
        self.feature_layers: tuple[int, ...] = (whole_number(section, "num_hidden_layers") + 1,)
        self.num_depths = num_depths
        self.rank_acceptance = []
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_depths))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        output = model.get_output_embeddings().weight.detach()
        self.register_buffer("output", output, persistent=False)
        self.register_buffer("draft_ids", torch.arange(len(output), device=output.device), persistent=False)

    def unroll(
        self,
        features: Mapping[int, torch.Tensor],
        token_ids: torch.Tensor,
        anchors: Sequence[torch.Tensor],
    ) -> Sequence[DraftRows]:
        """The tokens between are unknown to the heads."""
        last = features[self.feature_layers[0]].to(self.output.dtype)
        found = []
        for block, own in zip(self.blocks, anchors, strict=False):
            rows = last[:, : len(own)] if is_range(own) else last[:, own]
            found.append(DraftRows(F.linear(rows + F.silu(block(rows)), self.output)))
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Heads without an output of their own share the target's."""
        return {
            f"{depth}.0.linear.{name}": parameter.detach()
            for depth, block in enumerate(self.blocks)
            for name, parameter in block.named_parameters()
        }

    def config(self, target: str) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "base_model_name_or_path": target,
            "medusa_num_heads": self.num_depths,
            "medusa_num_layers": 1,
            "dtype": "bfloat16",
            **({RANK_ACCEPTANCE: self.rank_acceptance} if self.rank_acceptance else {}),
        }
