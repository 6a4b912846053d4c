"""Profiles, plans and checks as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specray.planning.curves import Surface, interpolate
from specray.planning.profile import LinearTime, Profile

if TYPE_CHECKING:
    from rich.table import Table

_COUNTS = (1, 8, 32)


def profile_table(profile: Profile) -> Table:
    """What was measured, at a few sizes."""
    from rich.table import Table

    target, draft = profile.target, profile.draft
    table = Table("", *(f"{count} sequences" for count in _COUNTS), title=f"profile {profile.name}".strip())
    verify = [(one.num_rows, one.seconds) for one in target.verify]
    for rows in (1, 4):
        cells = (interpolate(verify, rows * count) + target.per_sequence_s * count for count in _COUNTS)
        table.add_row(f"verify, {rows} rows each, ms", *map(_ms, cells))
    if draft is not None:
        propose = Surface((one.num_tokens, one.num_sequences, one.seconds) for one in draft.propose)
        table.add_row("propose 3 tokens, ms", *(_ms(propose(3, count)) for count in _COUNTS))
        table.add_row("draft transport, ms", *_linear(draft.transport))
    table.add_row("target transport, ms", *_linear(target.transport))
    table.add_row("router, before a Verify, ms", *_linear(profile.router.verify_after_proposal))
    table.add_section()
    for engine, role in ((target, "target"), (draft, "draft")):
        if engine is not None:
            longest = engine.prefill[-1]
            table.add_row(
                f"{role}: {engine.hardware}", f"{longest.num_tokens} prompt tokens", _ms(longest.seconds), ""
            )
    for one in profile.acceptance:
        rates = " ".join(f"{rate:.2f}" for rate in one.by_position[:6])
        hits = " ".join(f"{hit.width}: {hit.rate:.2f}" for hit in one.hit_rates)
        table.add_row(f"acceptance, temperature {one.temperature:g}", rates, hits and f"hits {hits}", "")
    return table


def _linear(time: LinearTime) -> tuple[str, ...]:
    return tuple(_ms(time.of(count)) for count in _COUNTS)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
