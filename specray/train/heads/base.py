"""What a head in training is: logits for each place ahead, and the checkpoint that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from specray.errors import ConfigError


class DraftRows(NamedTuple):
    """What a head gives at one depth."""

    logits: torch.Tensor
    """``[num_rows, num_anchors, draft_vocab_size]``."""
    confidence: torch.Tensor | None = None
    """``[num_rows, num_anchors]``: logit of the chance that the target draws what is drawn; None: unknown."""


class DraftHead(Protocol):
    """A head in training. An anchor q is a token; features of tokens 0..q are known, and tokens 0..q + 1.

    Depth s drafts token q + 2 + s, after the tokens of the text between them.
    """

    name: str
    """Name of the method, as the command has it."""
    feature_layers: tuple[int, ...]
    """Layers of the target that it reads, as ``target.FeatureReader`` numbers them."""
    draft_ids: torch.Tensor
    """The target's id of each column of its logits, ascending."""
    num_depths: int
    """Places ahead that are trained."""
    rank_acceptance: list[list[float]] | None
    """Chance of each rank by depth, as the last evaluation found; None: its trees need none."""

    @property
    def module(self) -> nn.Module:
        """The parameters."""
        ...

    def trained_anchors(self, num_tokens: int, generator: torch.Generator) -> Sequence[torch.Tensor]:
        """Anchors of each depth that a step computes, int64, ascending; none that an earlier depth lacks.

        Args:
            num_tokens: tokens of a row that are known; depth s has anchors below ``num_tokens - 1 - s``.
            generator: of the CPU; chooses some where not all are computed.
        """
        ...

    def unroll(
        self,
        features: Mapping[int, torch.Tensor],
        token_ids: torch.Tensor,
        anchors: Sequence[torch.Tensor],
    ) -> Sequence[DraftRows]:
        """What it drafts at each depth, at the anchors.

        Args:
            features: of each layer, ``[num_rows, num_features, target_hidden_size]``, from token 0 on.
            token_ids: ``[num_rows, num_tokens]``, from token 0 on.
            anchors: of each depth, as :meth:`trained_anchors` gives them; at most ``num_depths``.
        """
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors, under the authors' names."""
        ...

    def config(self, target: str) -> dict[str, Any]:
        """The checkpoint's configuration, for the target of that name."""
        ...


class HeadModule(nn.Module):
    """What heads that are modules do alike: all anchors are trained at each depth."""

    num_depths: int
    rank_acceptance: list[list[float]] | None = None

    @property
    def module(self) -> nn.Module:
        return self

    def trained_anchors(self, num_tokens: int, generator: torch.Generator) -> Sequence[torch.Tensor]:
        return all_anchors(num_tokens, self.num_depths)


def all_anchors(num_tokens: int, num_depths: int) -> list[torch.Tensor]:
    return [torch.arange(max(num_tokens - 1 - depth, 0)) for depth in range(num_depths)]


def is_range(anchors: torch.Tensor) -> bool:
    """Whether the anchors are 0, 1, 2 ..., so that rows can be had without a copy."""
    return len(anchors) == 0 or int(anchors[-1]) == len(anchors) - 1


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Layers that EAGLE-3 reads: near the beginning, the middle and the end."""
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({1, (num_layers + 1) // 2, num_layers}))


def text_section(config: Any) -> Any:
    """The part of a model's configuration that describes its text decoder."""
    return config.get_text_config()


def whole_number(section: Any, name: str, default: int | None = None) -> int:
    """A size of the target. Raises ConfigError where its configuration has none."""
    value = getattr(section, name, None)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ConfigError(f"the target's {name} is {value!r}; allowed: a whole number above 0")
    return value
