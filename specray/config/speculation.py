"""Configuration of speculation: how draft and target work together."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from specray.config.section import Section
from specray.draft_tokens import MAX_DRAFT_NODES, LookaheadBudget, TreeBudget
from specray.types import MAX_SPECULATIVE_TOKENS, Overlap, Verification


class SpeculationConfig(Section):
    """Number of draft tokens, overlap and verification."""

    num_speculative_tokens: int | Literal["auto"] = Field(
        "auto",
        description=f"K: maximum draft tokens per round, 0..{MAX_SPECULATIVE_TOKENS}; "
        "auto: chosen by measurement.",
    )
    verification: Verification = Verification.COUPLED
    overlap: Overlap | Literal["auto"] = "auto"
    tree: str = Field(
        "off",
        description="Trees of draft tokens: off, auto (where measurements promise more than a chain), a "
        "number of nodes, or the children of each node by depth, such as 4x2x1.",
    )
    fallback: Literal["none", "ngram", "suffix"] = Field(
        "ngram",
        description="Fallback proposer for rounds without a proposal of the draft model, while it pays off.",
    )
    lookahead: str = Field(
        str(LookaheadBudget()),
        description="Lookahead decoding of drafts 'lookahead': width of the window, tokens of an n-gram, and "
        f"n-grams verified at once (W x N x G); at most {MAX_DRAFT_NODES} rows.",
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
        return self.model_copy(update={"overlap": Overlap.SERIAL})

    @property
    def tree_budget(self) -> TreeBudget | None:
        """What every tree has; None: there are none, or it is chosen by measurement."""
        return None if self.tree in ("off", "auto") else _read_budget(self.tree)

    @property
    def lookahead_budget(self) -> LookaheadBudget:
        """What lookahead decoding may compute in each step."""
        return _read_lookahead(self.lookahead)

    @model_validator(mode="before")
    @classmethod
    def _refuse_control(cls, values: object) -> object:
        if isinstance(values, dict) and "control" in values:
            raise ValueError(
                f"control is {values['control']}; the key was removed, leave it out: K is always chosen from "
                "measured times"
            )
        return values

    @field_validator("lookahead")
    @classmethod
    def _check_lookahead(cls, lookahead: str) -> str:
        _read_lookahead(lookahead)
        return lookahead

    @field_validator("tree", mode="before")
    @classmethod
    def _read_tree(cls, tree: object) -> object:
        # YAML reads off as a boolean.
        if isinstance(tree, bool):
            return "on" if tree else "off"
        return str(tree) if isinstance(tree, int) else tree

    @field_validator("tree")
    @classmethod
    def _check_tree(cls, tree: str) -> str:
        if tree in ("off", "auto"):
            return tree
        try:
            if not re.fullmatch(rf"[0-9]{{1,2}}(x[0-9]{{1,2}}){{0,{MAX_SPECULATIVE_TOKENS - 1}}}", tree):
                raise ValueError
            _read_budget(tree)
        except ValueError:
            raise ValueError(
                f"tree is {tree}; allowed: off, auto, a number of nodes 1..{MAX_DRAFT_NODES}, or children "
                f"by depth such as 4x2x1: at most {MAX_DRAFT_NODES} nodes, {MAX_SPECULATIVE_TOKENS} depths"
            ) from None
        return tree

    @model_validator(mode="after")
    def _check_k(self) -> SpeculationConfig:
        k = self.num_speculative_tokens
        if k != "auto" and not 0 <= k <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(f"num_speculative_tokens is {k}; allowed: 0..{MAX_SPECULATIVE_TOKENS} or auto")
        return self


def _read_lookahead(lookahead: str) -> LookaheadBudget:
    """Reads W x N x G. Raises ValueError with what is allowed."""
    if not re.fullmatch(r"[0-9]{1,2}x[0-9]{1,2}x[0-9]{1,2}", lookahead):
        raise ValueError(f"lookahead is {lookahead}; allowed: three numbers such as {LookaheadBudget()}")
    return LookaheadBudget(*map(int, lookahead.split("x")))


def _read_budget(tree: str) -> TreeBudget:
    widths = [int(width) for width in tree.split("x")]
    return TreeBudget(widths[0]) if len(widths) == 1 else TreeBudget.of_widths(widths)
