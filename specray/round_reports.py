"""Reports of a request's rounds for a caller that watches it.

As ``requests``, it crosses boundaries and is plain and frozen.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step of an engine, as the router saw it. Milliseconds since the request arrived at the router."""

    started_ms: float
    """Time when the item was sent."""
    ended_ms: float
    """Time when the reply was taken."""
    forward_ms: float
    """Duration of the engine's own work, which other requests may share."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One round: what was proposed, what the target made of it, and when."""

    token_ids: tuple[int, ...]
    """Tokens that the output gained: accepted draft tokens, then the target's own unless it ended."""
    draft_token_ids: tuple[int, ...]
    """Draft tokens that were verified; nodes of a tree where ``draft_parents`` is set."""
    num_accepted_tokens: int
    """Draft tokens that are part of the output."""
    source: str
    """Proposer of the draft tokens; empty: there were none."""
    lookup: str
    """Result of looking the last verdict up in the outcomes drafted ahead; empty: none were asked for."""
    overlap: str
    """Overlap of the plan; ``off``: it asks for no draft tokens of the draft model."""
    num_speculative_tokens: int
    """K of the plan."""
    reason: str
    """Reason of the plan."""
    verify: EngineStep
    drafting: tuple[EngineStep, ...] = ()
    """Draft steps whose replies came since the round before."""
    draft_parents: tuple[int, ...] | None = None
    """Index of each node's parent, -1 for the root; None: a chain."""
    draft_probs: tuple[float, ...] = ()
    """Draft model's probability of each draft token, where it was sampled for rejection; else empty."""
