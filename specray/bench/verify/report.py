"""The table and the JSON of ``specray verify``."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from specray.bench.core.report import grid_of, values_of
from specray.bench.verify.run import Comparison, VerifyResult


def verify_table(result: VerifyResult) -> Table:
    """A row for each comparison, and its verdict."""
    plan, faults = result.plan, result.faults
    title = (
        f"{result.model}: {len(result.prompts)} prompts, {plan.max_tokens} tokens, "
        f"{plan.num_samples} samples of each under rejection"
    )
    rows = [
        (one.case, one.way, *_cells(one), _fault(one) if one in faults else _verdict(one))
        for one in result.comparisons
    ]
    caption = (
        "same: outputs equal to plain decoding's, tokens under rejection, or tasks that are solved; parts: "
        "divergences per 1,000 tokens; logprobs: largest distance before them; chance: of seeing that, or "
        "worse, where nothing is wrong"
    )
    headings = ["sampling", "drafts", "same", "parts in 1,000", "logprobs", "chance", "verdict"]
    return grid_of(title, headings, rows, text=("drafts", "verdict"), caption=caption)


def _cells(one: Comparison) -> tuple[str, str, str, str]:
    if one.not_offered:
        return "", "", "", ""
    chance = f"{one.p_value:.2g}"
    if one.num_solved is not None:
        plain, own, total = one.num_solved
        return f"{own} of {total}, plain {plain}", "", "", chance
    if one.calibration is not None:
        return f"{one.calibration.num_tokens} tokens", "", "", chance
    assert one.agreement is not None, "there is something to tell"
    found = one.agreement
    same = f"{found.num_outputs - found.num_diverged} of {found.num_outputs}"
    return same, f"{found.divergences_per_1000:.2f}", f"{found.max_logprob_distance:.1e}", chance


def _fault(one: Comparison) -> str:
    found = one.calibration
    if found is None:
        return "FAULT"
    return f"FAULT: {found.finding} ({found.seen:.3g}, due {found.expected:.3g})"


def _verdict(one: Comparison) -> str:
    return "not offered" if one.not_offered else "right"


def verify_json(result: VerifyResult) -> dict[str, Any]:
    """Everything but the prompts."""
    counts = {"num_prompts": len(result.prompts), "num_tasks": len(result.tasks)}
    return {
        "model": result.model,
        "plan": {**values_of(result.plan), **counts},
        "comparisons": [values_of(one) for one in result.comparisons],
        "faults": [f"{one.case}: {one.way}" for one in result.faults],
    }
