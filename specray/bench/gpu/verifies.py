"""Measures what verification adds to a forward: both as an engine runs them, in turns with the forward alone.

Logits of a large vocabulary are verified after the model's own, whose vocabulary may be small. The host
plans the sampling while the device still computes, so less is added than sampling takes alone (``sampling``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from specray.bench.core.turns import medians_ms
from specray.bench.forwards import wait_for
from specray.bench.gpu.sampling import SAMPLINGS, logits_of, rounds_of
from specray.engine.inputs import SequenceInput
from specray.engine.runner.runner import ModelRunner
from specray.engine.sampling.device.sampler import DeviceSampler
from specray.engine.sampling.device.select import choose_kernels
from specray.engine.sampling.sampler import DEFAULT_MAX_NUM_DRAFT_PROBS

_VOCAB_SIZE = 151_936
_NUM_DRAFTS = 4


@dataclass(frozen=True, slots=True)
class VerdictTime:
    """Milliseconds of a step of one kind: medians of turns."""

    sampling: str
    num_sequences: int
    forward_ms: float
    """Milliseconds of the forward alone."""
    verify_ms: float
    """Milliseconds of the forward and the verdicts."""

    @property
    def added_share(self) -> float:
        """What verdicts add, as a share of the forward."""
        return self.verify_ms / self.forward_ms - 1.0


def measure_verifies(
    runner: ModelRunner, steps: Sequence[Sequence[SequenceInput]], *, num_repeats: int, is_tiny: bool
) -> list[dict[str, Any]]:
    """Measures every kind of sampling after each step.

    Args:
        steps: each of some sequences, with ``_NUM_DRAFTS`` draft tokens and the one before them.
    """
    device = runner.info.device
    vocab_size = 300 if is_tiny else _VOCAB_SIZE
    sampler = DeviceSampler(choose_kernels(device), DEFAULT_MAX_NUM_DRAFT_PROBS)
    times = []
    for step in steps:
        count = len(step)
        logits = logits_of(count * (1 + _NUM_DRAFTS), vocab_size, device)
        for name in SAMPLINGS:
            rounds = rounds_of(name, count, _NUM_DRAFTS)

            def verify(
                step: Sequence[SequenceInput] = step, rounds: Any = rounds, logits: Any = logits
            ) -> None:
                runner.run(step)
                sampler.verify(logits, rounds)

            calls = (partial(runner.run, step), verify)
            forward_ms, verify_ms = medians_ms(calls, num_repeats, num_warmup=2, wait=wait_for(device))
            entry = VerdictTime(name, count, forward_ms, verify_ms)
            shape = {"vocab_size": vocab_size, "num_drafts": _NUM_DRAFTS}
            times.append({**asdict(entry), "added_share": entry.added_share, **shape})
    return times


def verify_step(sequences: int, context_len: int, block_size: int) -> list[SequenceInput]:
    """A step of sequences with draft tokens."""
    width = 1 + _NUM_DRAFTS
    num_blocks = -(-(context_len + width) // block_size)
    return [
        SequenceInput([2] * width, context_len, range(index * num_blocks, (index + 1) * num_blocks), width)
        for index in range(sequences)
    ]
