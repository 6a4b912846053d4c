"""Outcomes of a round, drafted while the target verifies it, as far as they go from the drafter's own output.

Of tokens under verification the target has given no features yet. So what the drafter gave for each stands
for them, as when they were drafted: an approximation that acceptance alone depends on. Their entries are
computed one after the other; the rows rank next tokens, and each (number accepted, next token) is a branch
that goes on from the output of the last accepted token::

    slots      told tokens      under verification     branches, one after the other
    entries    from features    from own outputs       from own outputs

When the verdict has come, all of them are given up: the next item brings the features of what was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specray.engine.drafting.chains import OutcomeBranches
from specray.engine.features.base import Context, Continued, FeatureStore
from specray.engine.features.chained.drafter import ChainedDrafter
from specray.engine.features.drafting import FeatureDrafting
from specray.engine.visibility import branch_visibility


def draft_outcomes(
    drafter: ChainedDrafter,
    store: FeatureStore,
    drafting: FeatureDrafting,
    outcomes: Sequence[OutcomeBranches],
) -> None:
    """Gives each its branches, all side by side.

    Args:
        outcomes: of sequences whose told tokens but the last have features; each wants a row at least.
    """
    contexts = [_context(outcome) for outcome in outcomes]
    logits, rows = _read(drafter, store, outcomes, contexts)
    places = [
        rows[index][accepted]
        for index, outcome in enumerate(outcomes)
        for accepted in range(outcome.first, outcome.last + 1)
    ]
    drafting.rank(logits[torch.tensor(places, device=logits.device)], outcomes)
    sources = {
        id(branch): rows[index][branch.num_accepted]
        for index, outcome in enumerate(outcomes)
        for branch in outcome.branches
    }
    while True:
        growing = [
            (context, outcome, outcome.growing)
            for context, outcome in zip(contexts, outcomes, strict=True)
            if outcome.growing
        ]
        if not growing:
            return
        continued = []
        for context, outcome, branches in growing:
            step = outcome.step(branches, [()] * len(branches))
            own = [sources[id(branch)] for branch in branches]
            continued.append(Continued(context, step.token_ids, own, step.visibility))
        chains = [branch for _, _, branches in growing for branch in branches]
        drafting.draw(drafter.advance(continued), chains)
        sources = {id(branch): row for row, branch in enumerate(chains)}


def _context(outcome: OutcomeBranches) -> Context:
    sequence = outcome.sequence
    told = sequence.token_ids[: sequence.num_tokens]
    return Context(told, sequence.block_table.block_ids, sequence.num_drafted_for)


def _read(
    drafter: ChainedDrafter,
    store: FeatureStore,
    outcomes: Sequence[OutcomeBranches],
    contexts: Sequence[Context],
) -> tuple[torch.Tensor, list[list[int]]]:
    """Reads the tokens under verification.

    Returns:
        Logits of all rows; and of each outcome, the row after each number of accepted tokens. The drafter's
        outputs are those of the same rows.
    """
    logits, outputs = [drafter.start(store, contexts)], [drafter.outputs]
    rows = [[index] for index in range(len(outcomes))]
    num_rows, before = len(outcomes), 0
    for depth in range(max(outcome.last for outcome in outcomes)):
        going = [index for index, outcome in enumerate(outcomes) if outcome.last > depth]
        continued = []
        for index in going:
            slot = outcomes[index].sequence.num_tokens + depth
            seen = branch_visibility(slot, slot, 1)
            token_id, source = outcomes[index].item.proposed_token_ids[depth], rows[index][depth] - before
            continued.append(Continued(contexts[index], (token_id,), (source,), (seen,)))
        logits.append(drafter.advance(continued))
        outputs.append(drafter.outputs)
        for place, index in enumerate(going):
            rows[index].append(num_rows + place)
        before, num_rows = num_rows, num_rows + len(going)
    drafter.outputs = torch.cat(outputs)
    return torch.cat(logits), rows
