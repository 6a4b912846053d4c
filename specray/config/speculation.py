"""Configuration of speculation: how draft and target work together."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from specray.config.section import Section
from specray.draft_tokens import MAX_DRAFT_NODES, TreeBudget
from specray.types import MAX_SPECULATIVE_TOKENS, Overlap, Verification


class SpeculationConfig(Section):
    """Number of draft tokens, overlap and verification."""

    num_speculative_tokens: int | Literal["auto"] = Field(
        "auto",
        description=f"K: maximum draft tokens per round, 0..{MAX_SPECULATIVE_TOKENS}; "
        "auto: chosen by measurement.",
    )
    control: Literal["measured", "simple"] = Field(
        "measured",
        description="How K auto is chosen: from measured times, or one K with an on/off experiment.",
    )
    verification: Verification = Verification.COUPLED
    # Measured on 2 cores shared by both engines, tokens/s: 193M target 164 serial, 168 auto; embedded pair
    # 876 serial, 829 auto. With the draft behind a network, overlap hides the latency: choose auto.
    overlap: Overlap | Literal["auto"] = Overlap.SERIAL
    tree: str = Field(
        "off",
        description="Trees of draft tokens: off, auto (where measurements promise more than a chain), or the "
        "children of each node by depth, such as 4x2x1.",
    )
    fallback: Literal["none", "ngram", "suffix"] = Field(
        "ngram",
        description="Fallback proposer for rounds without a proposal of the draft model, while it pays off.",
    )
    past_output_tokens: int = Field(
        0,
        ge=0,
        le=1_048_576,
        description="Maximum tokens of past outputs kept per tenant for its suffix drafts; 0: none.",
    )
    max_num_draft_probs: int = Field(
        64, ge=1, le=256, description="Support of the sparse draft distribution under rejection."
    )

    @property
    def without_overlap(self) -> SpeculationConfig:
        """The settings for drafts that take no time."""
        return self.model_copy(update={"overlap": Overlap.SERIAL})

    @property
    def tree_widths(self) -> tuple[int, ...]:
        """Children of each node by depth, of trees of one shape; empty: there is no shape."""
        return () if self.tree in ("off", "auto") else tuple(map(int, self.tree.split("x")))

    @field_validator("tree", mode="before")
    @classmethod
    def _read_tree(cls, tree: object) -> object:
        # YAML reads off as a boolean, and a shape of one depth as a number.
        if isinstance(tree, bool):
            return "on" if tree else "off"
        return str(tree) if isinstance(tree, int) else tree

    @field_validator("tree")
    @classmethod
    def _check_tree(cls, tree: str) -> str:
        if tree in ("off", "auto"):
            return tree
        allowed = (
            f"allowed: off, auto, or widths of 1 or more such as 4x2x1, at most {MAX_DRAFT_NODES} nodes and "
            f"{MAX_SPECULATIVE_TOKENS} depths"
        )
        widths = tree.split("x")
        if len(widths) > MAX_SPECULATIVE_TOKENS or not all(
            width.isascii() and width.isdecimal() and len(width) <= 2 for width in widths
        ):
            raise ValueError(f"tree is {tree}; {allowed}")
        try:
            TreeBudget.of_widths([int(width) for width in widths])
        except ValueError:
            raise ValueError(f"tree is {tree}; {allowed}") from None
        return tree

    @model_validator(mode="after")
    def _check_k(self) -> SpeculationConfig:
        k = self.num_speculative_tokens
        if k != "auto" and not 0 <= k <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(f"num_speculative_tokens is {k}; allowed: 0..{MAX_SPECULATIVE_TOKENS} or auto")
        return self
