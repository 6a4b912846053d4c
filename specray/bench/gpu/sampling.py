"""Measures sampling alone: verdicts and draft tokens from logits on the device, and their kernels.

Every kind of step is first compared with what a CPU draws from the same logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specray.bench.core.turns import medians_ms
from specray.bench.forwards import wait_for
from specray.draft_tokens import SparseProbs
from specray.engine.sampling.device.kernels import Kernels, Residuals
from specray.engine.sampling.device.rows import RowTable, TailCut, key_words
from specray.engine.sampling.device.sampler import DeviceSampler
from specray.engine.sampling.device.select import choose_kernels
from specray.engine.sampling.noise import NoiseKey, Purpose
from specray.engine.sampling.sampler import DEFAULT_MAX_NUM_DRAFT_PROBS, CpuSampler
from specray.engine.sampling.state import SamplingState, chain_rows
from specray.engine.sampling.verify import Round
from specray.types import SamplingParams, Verification

_PREFIX = tuple(range(2, 130))
_REJECTION = SamplingParams(verification=Verification.REJECTION)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "coupled": SamplingParams(),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties": SamplingParams(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
    "rejection": _REJECTION,
    "rejection, top-p 0.9": replace(_REJECTION, top_p=0.9),
}


@dataclass(frozen=True, slots=True)
class SamplingTime:
    """Milliseconds of one kind of step, from the call to the tokens on the host: a median."""

    kind: str
    """``verify`` or ``draw``."""
    sampling: str
    num_sequences: int
    num_rows: int
    ms: float


@dataclass(frozen=True, slots=True)
class SamplingLoad:
    """Sizes and repetitions to measure."""

    vocab_size: int = 151_936
    batches: tuple[int, ...] = (1, 8, 32)
    num_drafts: int = 4
    num_compared: int = 4
    """Sequences whose tokens are compared with a CPU's."""
    num_repeats: int = 20


TINY = SamplingLoad(vocab_size=300, batches=(1, 2), num_drafts=2, num_compared=2, num_repeats=2)


def measure(device: torch.device, workload: SamplingLoad) -> dict[str, Any]:
    """Measures everything and returns it in the report's form."""
    kernels = choose_kernels(device)
    sampler = DeviceSampler(kernels, DEFAULT_MAX_NUM_DRAFT_PROBS)
    differing = [name for name in SAMPLINGS if not _agrees(sampler, device, name, workload)]
    times = [
        SamplingTime(kind, name, count, count * (1 + (kind == "verify") * workload.num_drafts), ms)
        for name in SAMPLINGS
        for count in workload.batches
        for kind, ms in _step_times(sampler, device, name, count, workload)
    ]
    return {
        "kernels": type(kernels).__name__,
        "vocab_size": workload.vocab_size,
        "num_drafts": workload.num_drafts,
        "num_kinds": len(SAMPLINGS),
        "differing": differing,
        "times": [asdict(entry) for entry in times],
        "kernel_times": [
            {"kernel": name, "num_rows": num_rows, "ms": ms}
            for num_rows in sorted({1, workload.batches[-1] * (1 + workload.num_drafts)})
            for name, ms in _kernel_times(kernels, device, num_rows, workload)
        ],
    }


def logits_of(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Some logits, float32 ``[num_rows, vocab_size]``."""
    generator = torch.Generator().manual_seed(num_rows)
    return (3.0 * torch.randn(num_rows, vocab_size, generator=generator)).to(device)


def rounds_of(name: str, count: int, num_drafts: int) -> list[Round]:
    """Sequences whose draft tokens have nothing to do with the logits: most are rejected."""
    drafts = tuple(range(7, 7 + num_drafts))
    size = min(DEFAULT_MAX_NUM_DRAFT_PROBS, 100)
    sparse = SparseProbs(tuple(range(7, 7 + size)), (1.0 / size,) * size)
    rounds = []
    for index in range(count):
        sampling = replace(SAMPLINGS[name], seed=index, num_prompt_tokens=len(_PREFIX) // 2)
        group = chain_rows(SamplingState(sampling, _PREFIX), drafts)
        rounds.append(Round(group, drafts, (sparse,) * num_drafts if sampling.draws_by_rejection else ()))
    return rounds


def _agrees(sampler: DeviceSampler, device: torch.device, name: str, workload: SamplingLoad) -> bool:
    rounds = rounds_of(name, workload.num_compared, workload.num_drafts)
    groups = [item.group for item in rounds_of(name, workload.num_compared, 0)]
    cpu = CpuSampler(workload.vocab_size)
    logits = logits_of(workload.num_compared * (1 + workload.num_drafts), workload.vocab_size, device)
    first = logits[: workload.num_compared]
    drawn = [token.token_id for token in sampler.draw(first, groups)]
    expected = [token and token.token_id for token in cpu.draw(first.cpu(), groups)]
    return drawn == expected and sampler.verify(logits, rounds) == cpu.verify(logits.cpu(), rounds)


def _step_times(
    sampler: DeviceSampler, device: torch.device, name: str, count: int, workload: SamplingLoad
) -> list[tuple[str, float]]:
    rounds = rounds_of(name, count, workload.num_drafts)
    groups = [item.group for item in rounds_of(name, count, 0)]
    logits = logits_of(count * (1 + workload.num_drafts), workload.vocab_size, device)
    calls = {
        "verify": lambda: sampler.verify(logits, rounds),
        "draw": lambda: sampler.draw(logits[:count], groups, is_judged=True),
    }
    medians = [
        medians_ms([call], workload.num_repeats, num_warmup=2, wait=wait_for(device))[0]
        for call in calls.values()
    ]
    return list(zip(calls, medians, strict=True))


def _kernel_times(
    kernels: Kernels, device: torch.device, num_rows: int, workload: SamplingLoad
) -> list[tuple[str, float]]:
    """Each kernel many times in a row, which hides what the host does between two where it can."""
    logits = logits_of(num_rows, workload.vocab_size, device)
    plain, top_p, top_k = (_table(num_rows, device, k, p) for k, p in ((0, 1.0), (0, 0.9), (50, 1.0)))
    cut = kernels.cut(logits, top_p)
    sums = kernels.sums(logits, plain, None)
    residuals = Residuals(
        torch.arange(num_rows, device=device),
        plain.keys,
        torch.zeros(num_rows, workload.vocab_size, dtype=torch.float64, device=device),
    )

    def draw(table: RowTable, own: TailCut | None, is_judged: bool) -> Callable[[], object]:
        return lambda: kernels.draw(logits, table, own, is_judged=is_judged)

    calls: dict[str, Callable[[], object]] = {
        "draw": draw(plain, None, is_judged=False),
        "draw, judged": draw(plain, None, is_judged=True),
        "draw behind a cut": draw(top_p, cut, is_judged=False),
        "cut, top-p 0.9": lambda: kernels.cut(logits, top_p),
        "cut, top-k 50": lambda: kernels.cut(logits, top_k),
        "sums": lambda: kernels.sums(logits, plain, None),
        "residual draws": lambda: kernels.draw_residuals(logits, plain, None, sums, residuals),
    }
    return [(name, _mean_ms(call, device, workload.num_repeats)) for name, call in calls.items()]


def _table(num_rows: int, device: torch.device, top_k: int, top_p: float) -> RowTable:
    keys = [NoiseKey(row, row, Purpose.COUPLED_DRAW) for row in range(num_rows)]
    numbers = torch.ones(num_rows, dtype=torch.float64, device=device)
    return RowTable(
        torch.from_numpy(key_words(keys)).to(device),
        numbers,
        torch.full((num_rows,), top_k, device=device),
        numbers * top_p,
        numbers * -torch.inf,
        cuts=top_k > 0 or top_p < 1.0,
        has_top_k=top_k > 0,
        has_top_p=top_p < 1.0,
    )


def _mean_ms(call: Callable[[], object], device: torch.device, num_repeats: int) -> float:
    """Milliseconds of a call among others, between which nothing waits for the device."""
    wait = wait_for(device)
    call()
    wait()
    began = time.perf_counter()
    for _ in range(num_repeats):
        call()
    wait()
    return (time.perf_counter() - began) * 1e3 / num_repeats
