"""An EAGLE-3 head in training: one layer over joined features, unrolled on its own outputs.

Li et al., *EAGLE-3*, arXiv 2503.01840: at depth s the feature of the last token is what the head itself gave
at depth s - 1 (training-time test). A row of depth s belongs to an anchor q, and stands for token q + 1 + s.
It sees the first depth's rows of anchors up to q, which are made of true features, and of each later depth
the row of its own anchor alone: a chain that was drafted after q.

::

    depth 0 of anchors    0  1  ..  q        later depths of anchor q
    row of depth s sees   x  x  ..  x        1  2  ..  s
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specray.train.heads.base import DraftRows, HeadModule
from specray.train.heads.layer import FeatureEntry, HeadLayer, final_norm, layer_shape, rotary, rotated


class EagleHead(HeadModule):
    """Implements ``base.DraftHead``.

    Args:
        model: the target, of transformers; its embedding is read and not trained, and its head's rows are
            what the head's own begin with.
        draft_ids: int64 ``[draft_vocab_size]``, ascending: the target's ids that can be proposed.
        feature_layers: layers of the target that it reads, in this order.
        num_depths: places ahead that are trained.
        sizes: usual sizes of what it reads, as ``target.usual_sizes`` finds them.
    """

    name = "eagle3"
    target_embedding: torch.Tensor
    draft_ids: torch.Tensor

    def __init__(
        self,
        model: Any,
        draft_ids: torch.Tensor,
        *,
        feature_layers: tuple[int, ...],
        num_depths: int,
        seed: int,
        sizes: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape = layer_shape(model.config)
        self.feature_layers = feature_layers
        self.num_depths = num_depths
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc = FeatureEntry(shape, len(feature_layers), sizes)
            self.midlayer = HeadLayer(shape, width=2 * shape.hidden_size, has_hidden_norm=True)
        self.norm = final_norm(model, shape)
        rows = model.get_output_embeddings().weight.detach()[draft_ids]
        # Rows of tokens: the optimizer steps what has "embed" in its name as it does embeddings.
        self.unembedding = nn.Parameter(rows.clone())
        self.register_buffer(
            "target_embedding", model.get_input_embeddings().weight.detach(), persistent=False
        )
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def unroll(
        self,
        features: Mapping[int, torch.Tensor],
        token_ids: torch.Tensor,
        anchors: Sequence[torch.Tensor],
    ) -> Sequence[DraftRows]:
        hidden = self.fc.join([features[layer] for layer in self.feature_layers])
        embedded = F.embedding(token_ids[:, 1:], self.target_embedding).to(hidden.dtype)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        found = []
        for depth, own in enumerate(anchors):
            num_anchors = min(hidden.shape[1], embedded.shape[1] - depth)
            entering = embedded[:, depth : depth + num_anchors]
            hidden = self._step(entering, hidden[:, :num_anchors], depth, seen)
            rows = hidden if len(own) == num_anchors else hidden[:, own]
            found.append(DraftRows(F.linear(self.norm(rows), self.unembedding)))
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {name: tensor.detach() for name, tensor in self.named_parameters()}
        tensors["fc.weight"] = self.fc.written()
        tensors["lm_head.weight"] = tensors.pop("unembedding")
        vocab_size = len(self.target_embedding)
        known = torch.zeros(vocab_size, dtype=torch.bool)
        known[self.draft_ids.cpu()] = True
        tensors["t2d"] = known
        tensors["d2t"] = self.draft_ids.cpu() - torch.arange(len(self.draft_ids))
        return tensors

    def config(self, target: str) -> dict[str, Any]:
        shape = self.shape
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "base_model_name_or_path": target,
            **shape.fields(),
            "target_hidden_size": shape.hidden_size,
            "num_hidden_layers": 1,
            "vocab_size": len(self.target_embedding),
            "draft_vocab_size": len(self.draft_ids),
            "eagle_aux_hidden_state_layer_ids": list(self.feature_layers),
            "norm_before_residual": False,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }

    def _step(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        depth: int,
        seen: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """One depth of all anchors; its keys and values join ``seen``."""
        # The row of anchor q stands for token q + 1 + depth, whose entry is at position q + depth.
        positions = torch.arange(depth, depth + hidden.shape[1], device=hidden.device)
        query, key, value = self._projected(embedded, hidden, positions)
        seen.append((key, value))
        return self.midlayer.leave(chain_attention(query, seen).transpose(1, 2).flatten(2), hidden)

    def _projected(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, ``[num_rows, num_heads, num_entries, head_dim]`` each."""
        layer, groups = self.midlayer, self.shape.num_heads // self.shape.num_kv_heads
        entering = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), -1)
        cos, sin = rotary(positions, self.shape, hidden.dtype)
        query, key = (rotated(layer.heads(kind, entering), cos, sin) for kind in ("q", "k"))
        value = layer.heads("v", entering)
        return query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def chain_attention(query: torch.Tensor, seen: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Attention of one depth's rows to keys and values of all depths so far, its own the last.

    Args:
        query: ``[num_rows, num_heads, num_anchors, head_dim]``.
        seen: of each depth, keys and values of at least as many anchors.
    """
    num_anchors = query.shape[2]
    scale = query.shape[3] ** -0.5
    first_keys, first_values = (part[:, :, :num_anchors] for part in seen[0])
    later = [(keys[:, :, :num_anchors], values[:, :, :num_anchors]) for keys, values in seen[1:]]
    hidden = torch.ones(num_anchors, num_anchors, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ first_keys.transpose(2, 3)).float().masked_fill(hidden, float("-inf"))
    own = [(query * keys).float().sum(-1, keepdim=True) for keys, _ in later]
    probs = (torch.cat((scores, *own), -1) * scale).softmax(-1).to(query.dtype)
    attended: torch.Tensor = probs[..., :num_anchors] @ first_values
    for depth, (_, values) in enumerate(later):
        attended = attended + probs[..., num_anchors + depth, None] * values
    return attended
