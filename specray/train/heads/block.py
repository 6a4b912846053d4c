"""A block drafter in training: masks after the last token, over the target's features as context.

Chen et al., *DFlash*, arXiv 2602.06036. Joined residuals of the target give keys and values to every layer;
queries are of the block alone, whose rows see each other in both directions. Blocks are trained at some
anchors of each row, all in one forward::

    context           c0   c1   ...  cq                 of the target's tokens 0..q
    block of anchor q                    q + 1   mask   mask ...   sees c0..cq and itself

With a confidence head the layout is that of *DSpark* (arXiv 2607.05147) without its Markov head, in which
the row of token q + 1 drafts, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specray.train.heads.base import DraftRows, HeadModule, text_section, whole_number
from specray.train.heads.layer import FeatureEntry, HeadLayer, final_norm, layer_shape, rotary, rotated

MAX_ROWS = 2048
"""Rows of blocks that are computed at once."""


class BlockHead(HeadModule):
    """Implements ``base.DraftHead``.

    Args:
        model: the target, of transformers; its embedding and its head are read and not trained.
        feature_layers: layers of the target that it reads, in this order.
        num_layers: its own layers.
        num_depths: places ahead that are trained: masks of a block, and with a confidence head one more row.
        mask_id: token of the target that stands for one to be drafted.
        has_confidence: it also learns the chance that the target draws what is drawn.
        anchor_share: share of a row's anchors that a step computes, in (0, 1].
        sizes: usual sizes of what it reads, as ``target.usual_sizes`` finds them.
    """

    name = "block"
    output: torch.Tensor
    draft_ids: torch.Tensor

    def __init__(
        self,
        model: Any,
        *,
        feature_layers: tuple[int, ...],
        num_layers: int,
        num_depths: int,
        mask_id: int,
        has_confidence: bool,
        anchor_share: float,
        seed: int,
        sizes: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape = layer_shape(model.config)
        self.feature_layers = feature_layers
        self.num_depths = num_depths
        self.block_size = num_depths if has_confidence else num_depths + 1
        self._num_target_layers = whole_number(text_section(model.config), "num_hidden_layers")
        self._mask_id = mask_id
        self._anchor_share = anchor_share
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc = FeatureEntry(shape, len(feature_layers), sizes)
            self.layers = nn.ModuleList(
                HeadLayer(shape, width=hidden, has_head_norms=True) for _ in range(num_layers)
            )
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden, 1)}) if has_confidence else None
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.norm = final_norm(model, shape)
        output = model.get_output_embeddings().weight.detach()
        self.register_buffer("output", output, persistent=False)
        embedding = model.get_input_embeddings()
        self._vocab_size = len(embedding.weight)
        # Not the table alone: some targets scale what they look up. A method is no part of this module.
        self._embed = embedding.forward
        self.register_buffer("draft_ids", torch.arange(len(output), device=output.device), persistent=False)

    def trained_anchors(self, num_tokens: int, generator: torch.Generator) -> Sequence[torch.Tensor]:
        """A share of the first depth's, and of these all that later depths have."""
        count = num_tokens - 1
        chosen = torch.randperm(count, generator=generator)[: max(1, round(self._anchor_share * count))]
        first = chosen.sort().values
        return [first[first < count - depth] for depth in range(self.num_depths)]

    def unroll(
        self,
        features: Mapping[int, torch.Tensor],
        token_ids: torch.Tensor,
        anchors: Sequence[torch.Tensor],
    ) -> Sequence[DraftRows]:
        """The tokens between are unknown to the rows."""
        context = self.hidden_norm(self.fc.join([features[layer] for layer in self.feature_layers]))
        groups = torch.split(anchors[0], max(1, MAX_ROWS // self.block_size))
        blocks = torch.cat([self._blocks(context, token_ids, group) for group in groups], 1)
        drawing = blocks[:, :, self.block_size - self.num_depths :]
        found = []
        for depth, own in enumerate(anchors):
            # Later depths have the first ones of the anchors, or some of them.
            rows = drawing[:, torch.searchsorted(anchors[0], own), depth]
            confidence = None
            if self.confidence_head is not None:
                # It judges, and does not change what it judges.
                confidence = self.confidence_head["proj"](rows.detach())[..., 0]
            found.append(DraftRows(F.linear(rows, self.output), confidence))
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Without embedding and head, which are the target's."""
        tensors = {name: tensor.detach() for name, tensor in self.named_parameters()}
        return {**tensors, "fc.weight": self.fc.written()}

    def config(self, target: str) -> dict[str, Any]:
        # Ids are of what leaves layers, one less than of what enters.
        read = {
            "mask_token_id": self._mask_id,
            "target_layer_ids": [layer - 1 for layer in self.feature_layers],
        }
        shared = {
            "model_type": "qwen3",
            "base_model_name_or_path": target,
            **self.shape.fields(),
            "num_hidden_layers": len(self.layers),
            "num_target_layers": self._num_target_layers,
            "vocab_size": self._vocab_size,
            "block_size": self.block_size,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
        if self.confidence_head is None:
            return {"architectures": ["DFlashDraftModel"], **shared, "dflash_config": read}
        return {
            "architectures": ["Qwen3DSparkModel"],
            **shared,
            **read,
            "markov_rank": 0,
            "enable_confidence_head": True,
            "confidence_head_with_markov": False,
            "sample_from_anchor": True,
        }

    def _blocks(self, context: torch.Tensor, token_ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Outputs of the final norm, ``[num_rows, num_anchors, block_size, hidden_size]``."""
        num_rows, num_context = context.shape[:2]
        ids = torch.full((num_rows, len(anchors), self.block_size), self._mask_id, device=token_ids.device)
        ids[:, :, 0] = token_ids[:, anchors + 1]
        with torch.no_grad():
            hidden = self._embed(ids).to(context.dtype)
        places = torch.arange(self.block_size, device=context.device)
        own = rotary(anchors[:, None] + 1 + places, self.shape, context.dtype)
        before = rotary(torch.arange(num_context, device=context.device), self.shape, context.dtype)
        for layer in self.layers:
            assert isinstance(layer, HeadLayer)
            entering = layer.input_layernorm(hidden)
            query, key = (rotated(layer.heads(kind, entering), *own) for kind in ("q", "k"))
            attended = block_attention(
                query,
                (rotated(layer.heads("k", context), *before), layer.heads("v", context)),
                (key, layer.heads("v", entering)),
                anchors,
            )
            hidden = layer.leave(attended, hidden)
        normed: torch.Tensor = self.norm(hidden)
        return normed


def block_attention(
    query: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    anchors: torch.Tensor,
) -> torch.Tensor:
    """Attention of blocks to what comes before them and to themselves.

    Args:
        query: ``[num_rows, num_heads, num_anchors, block_size, head_dim]``.
        context: keys and values, ``[num_rows, num_kv_heads, num_tokens, head_dim]``.
        own: keys and values of the blocks, as ``query`` with ``num_kv_heads``.
        anchors: ``[num_anchors]``: the last token of the context that each block sees.

    Returns:
        ``[num_rows, num_anchors, block_size, num_heads * head_dim]``.
    """
    num_rows, num_heads, num_anchors, size, head_dim = query.shape
    keys, values = context
    num_kv_heads, num_tokens = keys.shape[1:3]
    # Query heads that share a key head are further rows of it.
    grouped = query.reshape(num_rows, num_kv_heads, -1, head_dim)
    shape = (num_rows, num_kv_heads, num_heads // num_kv_heads, num_anchors, size)
    before = (grouped @ keys.transpose(2, 3)).view(*shape, num_tokens).float()
    is_hidden = torch.arange(num_tokens, device=query.device) > anchors[:, None]
    before = before.masked_fill(is_hidden[:, None], float("-inf"))
    by_group = query.view(*shape, head_dim)
    within = torch.einsum("nkgaqd,nkasd->nkgaqs", by_group, own[0]).float()
    probs = (torch.cat((before, within), -1) * head_dim**-0.5).softmax(-1).to(query.dtype)
    first = (probs[..., :num_tokens].reshape(num_rows, num_kv_heads, -1, num_tokens) @ values).view(
        *shape, head_dim
    )
    attended: torch.Tensor = first + torch.einsum("nkgaqs,nkasd->nkgaqd", probs[..., num_tokens:], own[1])
    return attended.flatten(1, 2).permute(0, 2, 3, 1, 4).flatten(3)
