"""Configuration of speculation: how draft and target work together."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from specray.config.section import Section
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

    @model_validator(mode="after")
    def _check_k(self) -> SpeculationConfig:
        k = self.num_speculative_tokens
        if k != "auto" and not 0 <= k <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(f"num_speculative_tokens is {k}; allowed: 0..{MAX_SPECULATIVE_TOKENS} or auto")
        return self
