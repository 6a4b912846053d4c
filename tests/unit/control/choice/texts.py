"""Texts that repeat their prompt and agree with a draft as much as a test says, served in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specray.config import SpeculationConfig
from specray.planning.load import ClosedLoad, FixedLength
from specray.planning.profile import (
    LENGTH_DIGITS,
    AcceptanceProfile,
    DraftProfile,
    MeasuredOutput,
    ProposalLengths,
    TargetProfile,
)
from specray.planning.simulation.fleet import Kit
from specray.planning.simulation.runs import simulate_closed
from specray.types import DraftKind
from tests.unit.planning.parts import LIMITS

VERIFY_S = 0.020
NUM_PROMPT_TOKENS = 200
SURE, UNSURE = 0.97, 0.25
"""Chances at which a simulated draft is right, and which it knows."""
BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
MAX_LENGTH = len(LENGTH_DIGITS) - 1


@dataclass(frozen=True)
class Phase:
    """A part of a text."""

    num_tokens: int
    repeats: float
    """P(a token is the prompt's next one)."""
    agrees: float
    """P(the draft's token is right), between UNSURE and SURE."""


@dataclass(frozen=True)
class Machine:
    """Step times as multiples of VERIFY_S."""

    draft_step: float = 0.2
    row: float = 0.02
    """A further row of the target."""
    slowdown: float = 1.0
    """A step of one engine while the other works."""

    def verify_s(self, num_rows: int) -> float:
        return VERIFY_S * (1 + self.row * (num_rows - 1))

    def draft_s(self, num_rows: int) -> float:
        return VERIFY_S * self.draft_step * (1 + 0.03 * (num_rows - 1))


def text(phases: Sequence[Phase], seed: int) -> MeasuredOutput:
    """Writes a text: tokens of the prompt in its order, and between them tokens that come once."""
    rng = random.Random(seed)
    prompt = tuple(range(1, NUM_PROMPT_TOKENS + 1))
    fresh, place = NUM_PROMPT_TOKENS, rng.randrange(NUM_PROMPT_TOKENS)
    tokens: list[int] = []
    chances: list[float] = []
    for phase in phases:
        share = (phase.agrees - UNSURE) / (SURE - UNSURE)
        for _ in range(phase.num_tokens):
            place = (place + 1) % NUM_PROMPT_TOKENS
            fresh += 1
            tokens.append(prompt[place] if rng.random() < phase.repeats else fresh)
            chances.append(SURE if rng.random() < share else UNSURE)
    return MeasuredOutput(
        prompt=prompt,
        tokens=tuple(tokens),
        agreements="".join("01"[rng.random() < chance] for chance in chances),
        lengths=tuple(_lengths(chances, bound) for bound in BOUNDS),
    )


def _lengths(chances: Sequence[float], bound: float) -> ProposalLengths:
    digits = []
    for start in range(len(chances)):
        chance, length = 1.0, 0
        while length < MAX_LENGTH and start + length < len(chances):
            chance *= chances[start + length]
            if chance < bound:
                break
            length += 1
        digits.append(LENGTH_DIGITS[max(1, length)])
    return ProposalLengths(min_acceptance=bound, by_position="".join(digits))


def kit(machine: Machine, outputs: Sequence[MeasuredOutput]) -> Kit:
    """The pair on that machine, with the service's defaults."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    target = {
        "model": "large",
        "hardware": "one",
        "prefill": [{"num_tokens": 1, "seconds": VERIFY_S}, {"num_tokens": 200, "seconds": 4 * VERIFY_S}],
        "verify": [{"num_rows": rows, "seconds": machine.verify_s(rows)} for rows in (1, 64)],
        "step_times": [{"num_rows": rows, "seconds": machine.verify_s(rows)} for rows in sizes],
        "slowdown_beside_draft": machine.slowdown,
        "prompt_slowdown_beside_draft": machine.slowdown,
    }
    draft = {
        "model": "small",
        "hardware": "one",
        "prefill": [
            {"num_tokens": 1, "seconds": machine.draft_s(1)},
            {"num_tokens": 200, "seconds": 4 * machine.draft_s(1)},
        ],
        "propose": [
            {"num_sequences": rows, "num_tokens": k, "seconds": k * machine.draft_s(rows)}
            for rows in (1, 8, 64)
            for k in (1, 32)
        ],
        "outcomes": [
            {"num_branches": rows, "num_tokens": k, "seconds": (k + 1) * machine.draft_s(rows)}
            for rows in (1, 8, 64)
            for k in (1, 16)
        ],
        "step_times": [{"num_rows": rows, "seconds": machine.draft_s(rows)} for rows in sizes],
        "slowdown_beside_target": machine.slowdown,
    }
    profile = AcceptanceProfile(temperature=0.0, by_position=(0.5,), num_rounds=100, outputs=tuple(outputs))
    return Kit(
        TargetProfile.model_validate(LIMITS | target),
        DraftProfile.model_validate(LIMITS | draft),
        profile,
        shares_hardware=machine.slowdown > 1,
        is_replay=True,
    )


def method(base: Kit, name: str, **values: Any) -> Kit:
    """The same pair with one method alone: ``plain``, ``ngram`` or ``model``; or ``service``."""
    config = {} if name == "service" else {"overlap": "serial", "fallback": "none"}
    speculation = SpeculationConfig.model_validate(config | values)
    if name in ("plain", "ngram"):
        kind = DraftKind.NGRAM if name == "ngram" else DraftKind.MODEL
        return replace(base, draft=None, draft_kind=kind, speculation=speculation)
    return replace(base, speculation=speculation)


def tokens_per_s(base: Kit, *, num_requests: int = 1, concurrency: int = 1) -> float:
    """Tokens per virtual second of requests for the texts in turns."""
    assert base.acceptance is not None
    length = FixedLength(len(base.acceptance.outputs[0].tokens))
    load = ClosedLoad(concurrency, num_requests, length, length)
    return simulate_closed(base, load, num_drafts=int(base.draft is not None)).tokens_per_s
