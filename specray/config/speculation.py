"""How draft and target work together."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from specray.config.section import Section
from specray.types import MAX_SPECULATIVE_TOKENS, Overlap, Verification


class SpeculationConfig(Section):
    """How the pair works together."""

    num_speculative_tokens: int | Literal["auto"] = Field(
        "auto", description="K: most draft tokens per round, 0..32; auto: chosen by measurement."
    )
    control: Literal["measured", "simple"] = Field(
        "measured",
        description="How K auto is chosen: from measured times, or one K with an on/off experiment.",
    )
    verification: Verification = Verification.COUPLED
    # Measured on 2 cores that both engines share, tokens/s: a 193M target 164 serial, 168 auto; the embedded
    # pair 876 and 829. Where the draft is behind a network, overlap hides the way: choose auto.
    overlap: Overlap | Literal["auto"] = Overlap.SERIAL
    fallback: Literal["none", "ngram", "suffix"] = Field(
        "ngram",
        description="What is verified where the draft model has nothing to offer, while its acceptance pays.",
    )
    past_output_tokens: int = Field(
        0,
        ge=0,
        le=1_048_576,
        description="Tokens of past outputs kept per tenant, for suffix drafts of its requests; 0: none.",
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
