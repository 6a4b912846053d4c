"""Profiles with round numbers, for tests whose results can be computed by hand."""

from __future__ import annotations

from typing import Any

from specray.config import SpeculationConfig
from specray.planning.profile import (
    AcceptanceProfile,
    DraftProfile,
    LinearTime,
    MeasuredOutput,
    TargetProfile,
)
from specray.planning.simulation.fleet import Kit

VERIFY_S = 0.010
PREFILL_S = 0.020
PROPOSE_S = 0.004
LIMITS: dict[str, Any] = {
    "vocab_size": 16,
    "max_model_len": 4096,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "block_size": 16,
    "num_blocks": 0,
}


def target(**changes: Any) -> TargetProfile:
    """Makes a target whose steps take VERIFY_S and whose prompts take PREFILL_S; nothing else takes time."""
    values: dict[str, Any] = {
        "model": "large",
        "hardware": "big",
        "prefill": [{"num_tokens": 1, "seconds": PREFILL_S}],
        "verify": [{"num_rows": 1, "seconds": VERIFY_S}],
    }
    return TargetProfile.model_validate(LIMITS | values | changes)


def draft(**changes: Any) -> DraftProfile:
    """Makes a draft whose steps take PROPOSE_S; prompts take almost no time."""
    values: dict[str, Any] = {
        "model": "small",
        "hardware": "little",
        "prefill": [{"num_tokens": 1, "seconds": 1e-9}],
        "propose": [{"num_sequences": 1, "num_tokens": 1, "seconds": PROPOSE_S}],
    }
    return DraftProfile.model_validate(LIMITS | values | changes)


def acceptance(rate: float) -> AcceptanceProfile:
    """Makes an acceptance with the same rate at every position."""
    return AcceptanceProfile(temperature=0.0, by_position=(rate,), num_rounds=100)


def output(agreements: str, *, prompt: tuple[int, ...] = (1, 2), **changes: Any) -> MeasuredOutput:
    """Makes an output that repeats nothing, unless its tokens are given."""
    first = max(prompt) + 1
    values = {"prompt": prompt, "tokens": range(first, first + len(agreements)), "agreements": agreements}
    return MeasuredOutput.model_validate(values | changes)


def replayed(*outputs: MeasuredOutput) -> AcceptanceProfile:
    """Makes an acceptance with measured outputs, and rates that are not used."""
    return AcceptanceProfile(temperature=0.0, by_position=(0.5,), num_rounds=100, outputs=outputs)


def plain_kit(**changes: Any) -> Kit:
    """Makes a kit without a draft."""
    return Kit(target(**changes), None, None)


def serial_kit(k: int, rate: float = 1.0, **target_changes: Any) -> Kit:
    """Makes a kit in which draft and target take turns, with K draft tokens per round."""
    speculation = SpeculationConfig.model_validate({"num_speculative_tokens": k, "overlap": "serial"})
    return Kit(target(**target_changes), draft(), acceptance(rate), speculation=speculation)


def linear(fixed_s: float, per_item_s: float = 0.0) -> LinearTime:
    return LinearTime(fixed_s=fixed_s, per_item_s=per_item_s)
