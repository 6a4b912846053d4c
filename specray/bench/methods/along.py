"""Measures acceptance along plain decoding's outputs: of each method, what it would have proposed.

Under greedy and coupled verification the output does not depend on the draft. So the target writes each
output once, alone, and every method is then led along it, round by round: what of its draft tokens the output
has is what the target would have accepted. That takes the draft's time alone, many outputs side by side, and
nothing of it depends on how busy the machine is. It says nothing about tokens per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specray.bench.core.figures import Tally
from specray.bench.methods.method import ALL, SERVICE, Method, MethodRow
from specray.bench.proposals import WrittenOutput, asked
from specray.draft_tokens import DraftTokens, TreeBudget
from specray.drafting import SessionProposer, make_proposer
from specray.errors import ConfigError
from specray.interfaces import Drafter
from specray.requests import SpeculationStats
from specray.types import DraftKind, SpeculateItem

_SIDE_BY_SIDE = 16


@dataclass(slots=True)
class _Walk:
    request_id: str
    output: WrittenOutput
    tally: Tally
    place: int = 0
    """Output tokens committed."""
    num_sent: int = 0
    """Tokens, with the prompt, that the draft has received."""
    proposer: SessionProposer | None = None
    """Proposes without a model; None: the draft model does."""

    @property
    def is_open(self) -> bool:
        return self.place < len(self.output.tokens)

    @property
    def depth(self) -> int:
        return len(self.output.tokens) - self.place - 1

    def new_tokens(self) -> tuple[int, ...]:
        """Committed tokens that the draft has not received; they are sent now."""
        committed = (*self.output.prompt, *self.output.tokens[: self.place])
        new = committed[self.num_sent :]
        self.num_sent = len(committed)
        return new

    def take(self, draft: DraftTokens) -> None:
        """A round: accepts what the output has of the draft tokens, and one token more."""
        draft = draft.within(max(0, self.depth))
        num_accepted = len(draft.path(draft.common(self.output.tokens[self.place :])))
        histogram = [0] * (draft.depth + 1)
        histogram[num_accepted] = 1
        stats = (
            SpeculationStats(1, len(draft), num_accepted, tuple(histogram)) if draft else SpeculationStats()
        )
        self.tally.add(stats, num_tokens=num_accepted + 1)
        self.place += num_accepted + 1


def fixed_tree(method: Method, k: int) -> TreeBudget | None:
    """The method's tree of paths of at most ``k`` tokens; None: a chain. Raises ConfigError."""
    if method.name == SERVICE:
        raise ConfigError(
            f"--method is {SERVICE!r}, which chooses by times; allowed without --only-acceptance"
        )
    if method.tree == "auto":
        raise ConfigError(f"--method is {method.name!r}; allowed with --only-acceptance: a tree that is set")
    budget = method.budget
    return budget if budget is None or not budget.widths else TreeBudget.of_widths(budget.widths[:k])


async def walk_along(
    drafter: Drafter | None, method: Method, outputs: Sequence[WrittenOutput], k: int
) -> list[Tally]:
    """Leads a method along outputs; a tally for each.

    Args:
        drafter: a connection to a draft that serves nobody else meanwhile.
        k: draft steps per round, and most draft tokens of a path.

    Raises:
        ConfigError: the method's tree is chosen by measurement, or it drafts in the target.
        EngineLostError: the draft was lost, took too long, or refused a question.
    """
    if method.is_in_target:
        raise ConfigError(f"--method is {method.name!r}, which drafts in the target's steps; it is served")
    tree = fixed_tree(method, k)
    walks = [_Walk(f"{method.name}-{n}", output, Tally()) for n, output in enumerate(outputs)]
    for start in range(0, len(walks), _SIDE_BY_SIDE):
        part = walks[start : start + _SIDE_BY_SIDE]
        for walk in part:
            walk.tally.begin_turn()
            if method.draft not in (None, DraftKind.MODEL):
                walk.proposer = make_proposer(method.draft)
        if method.draft is DraftKind.MODEL:
            if drafter is None:
                raise ConfigError(f"--method is {method.name!r}; allowed with a draft model: --draft")
            await _walk_with_model(drafter, part, tree, k)
        else:
            for walk in part:
                _walk_alone(walk, tree, k)
    for walk in walks:
        # Each round was counted as an output.
        walk.tally.num_equal = walk.tally.num_outputs = 1
    return [walk.tally for walk in walks]


def _walk_alone(walk: _Walk, tree: TreeBudget | None, k: int) -> None:
    while walk.is_open:
        draft = DraftTokens()
        if walk.proposer is not None:
            walk.proposer.extend(walk.new_tokens())
            draft = walk.proposer.propose(min(k, walk.depth), 0 if tree is None else tree.num_nodes)
        walk.take(draft)


async def _walk_with_model(drafter: Drafter, walks: Sequence[_Walk], tree: TreeBudget | None, k: int) -> None:
    by_id = {walk.request_id: walk for walk in walks}
    for round_id in range(1, max(len(walk.output.tokens) for walk in walks) + 1):
        still = sorted(walk.request_id for walk in walks if walk.is_open)
        if not still:
            break
        items = [_item(by_id[name], round_id, tree, k) for name in still]
        for proposal in await asked(drafter, items):
            by_id[proposal.request_id].take(proposal.draft)
    await drafter.release(list(by_id))


def _item(walk: _Walk, round_id: int, tree: TreeBudget | None, k: int) -> SpeculateItem:
    base_len = walk.num_sent
    sampling = walk.output.sampling if base_len == 0 else None
    item = SpeculateItem(walk.request_id, round_id, base_len, walk.new_tokens(), max(1, min(k, walk.depth)))
    return replace(item, sampling=sampling, tree=tree)


def rows_along(
    temperature: float, categories: Sequence[str], tallies: Mapping[str, Sequence[Tally]]
) -> list[MethodRow]:
    """The figures of every method, of all outputs and by category.

    Args:
        categories: of the outputs; empty: it has none.
        tallies: of the outputs, by method.
    """
    names = [ALL, *dict.fromkeys(name for name in categories if name)]
    return [
        MethodRow.of(
            temperature,
            name,
            method,
            Tally.merged(one for one, own in zip(found, categories, strict=True) if name in (ALL, own)),
        )
        for name in names
        for method, found in tallies.items()
    ]
