"""Small values of a session: what is drafted, what a verdict meant."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Final, NamedTuple

from specray.control.state import TreeVerdict
from specray.draft_tokens import NO_DRAFT, DraftTokens, TreeBudget
from specray.errors import ProtocolError
from specray.requests import SpeculationStats
from specray.types import DraftKind, TokenLogprobs

FALLBACK = "fallback"
"""Source of draft tokens from the local proposer that stands in for a draft model."""
GRAMMAR = "grammar"
"""Source of draft tokens that the request's grammar forces."""
PREDICTION = "prediction"
"""Source of draft tokens from the output that the request predicts."""


@dataclass(slots=True)
class PromptScores:
    """Logprobs of a prompt's tokens but the first; some chunks of a prompt are computed twice."""

    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, base_len: int, scores: Sequence[TokenLogprobs]) -> None:
        """Takes those of the tokens from ``base_len`` on, as far as they are new."""
        num_known = len(self.logprobs) + 1 - max(1, base_len)
        if num_known >= 0:
            self.logprobs.extend(scores[num_known:])


@dataclass(frozen=True, slots=True)
class NextDraft:
    """What the target's own drafter is asked for after the next verdict."""

    num_tokens: int = 0
    """Most draft tokens, of a tree those of a path; 0: nothing is asked for."""
    min_acceptance: float = 0.0
    """Least chance that all of a chain is accepted."""
    tree: TreeBudget | None = None
    """None: a chain."""


NOTHING_NEXT: Final = NextDraft()
"""Nothing is asked of the target's drafter."""


@dataclass(slots=True)
class RoundTimer:
    """Measures what a round takes besides the work of both engines. Seconds are on the router's clock."""

    _started_s: float | None = None
    """Time when the first item of the round in flight was sent."""
    _draft_s: float = 0.0
    """Time of the draft steps that the round had to wait for."""

    def restart(self, now: float) -> None:
        """A proposal is asked for: the round begins."""
        self._started_s = now

    def start(self, now: float) -> None:
        """A Verify is sent: the round begins, if it has not yet."""
        if self._started_s is None:
            self._started_s = now

    def add_draft_step(self, seconds: float) -> None:
        """The round waited for a draft step of ``seconds``."""
        self._draft_s += seconds

    def end(self, now: float, target_s: float) -> float | None:
        """Ends the round, whose target step took ``target_s``; the seconds that no engine worked.

        Returns:
            None: no round had begun.
        """
        started_s, draft_s = self._started_s, self._draft_s
        self._started_s, self._draft_s = None, 0.0
        return None if started_s is None else max(0.0, now - started_s - target_s - draft_s)

    def stop(self) -> None:
        self._started_s = None


class Lookup(enum.Enum):
    """What the outcomes said of a verdict."""

    NOT_ASKED = "not_asked"
    """The draft was not asked for outcomes of this round."""
    PENDING = "pending"
    """It was, and has not answered yet."""
    HIT = "hit"
    MISS_TOKEN = "miss_token"
    """The number of accepted tokens was foreseen, the next token was not among its branches."""
    MISS_COUNT = "miss_count"
    """No branch was asked for this number of accepted tokens."""


class Commit(NamedTuple):
    """What a verdict added to the output."""

    token_ids: tuple[int, ...] = ()
    """Tokens that are kept after stop conditions; empty for a chunk of a prefill."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_draft_tokens: int = 0
    """Draft tokens that were verified: all nodes of a tree."""
    num_accepted_tokens: int = 0
    """Accepted draft tokens, before stop conditions: what the control learns from."""
    num_kept_tokens: int = 0
    """Accepted draft tokens that are part of the output: those after its end are not."""
    lookup: Lookup = Lookup.NOT_ASKED
    source: str = DraftKind.MODEL.value
    """Proposer of the draft tokens."""
    depth: int = 0
    """Draft tokens that could have been accepted: all of a chain, of a tree those of its longest path."""
    tree: TreeVerdict | None = None
    """What was accepted of a tree and of its first chain; None: the draft tokens are a chain."""
    offered: DraftTokens = NO_DRAFT
    """What the target itself proposes after all committed tokens."""
    had_window: bool = False
    """The target was to look ahead in the round."""
    next_draft: DraftTokens = NO_DRAFT
    """Draft tokens of the target's own drafter, after all that is committed now."""

    @property
    def num_chain_tokens(self) -> int:
        """Draft tokens of the chain, of a tree those of its first."""
        return self.num_draft_tokens if self.tree is None else self.tree.num_chain_nodes

    @property
    def num_chain_accepted(self) -> int:
        """Tokens of the first chain that were accepted."""
        return self.num_accepted_tokens if self.tree is None else self.tree.num_chain_accepted


@dataclass(slots=True)
class RequestCounts:
    """Counters of one request.

    While it runs, ``num_verified_tokens == num_accepted_tokens + num_rounds``. The last round verifies more
    if the output ends before its last token.
    """

    num_rounds: int = 0
    num_verified_tokens: int = 0
    """Output tokens before stop trimming."""
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that are part of the output."""
    histogram: list[int] = field(default_factory=list)
    num_accepted_prediction_tokens: int = 0
    """Tokens of the request's prediction that are part of the output."""
    num_rejected_prediction_tokens: int = 0
    """Tokens of the request's prediction that are not."""

    def observe(self, num_drafts: int, depth: int, num_accepted: int, num_kept: int) -> None:
        """Counts one round, of whose accepted draft tokens ``num_kept`` are part of the output.

        Args:
            depth: draft tokens that could have been accepted, fewer than all where they are a tree.
        """
        self.num_rounds += 1
        self.num_verified_tokens += num_accepted + 1
        if num_drafts == 0:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_kept
        self.histogram.extend([0] * (depth + 1 - len(self.histogram)))
        self.histogram[num_kept] += 1

    @property
    def stats(self) -> SpeculationStats:
        """The counters that a user may see."""
        return SpeculationStats(
            self.num_spec_steps,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            tuple(self.histogram),
            self.num_accepted_prediction_tokens,
            self.num_rejected_prediction_tokens,
        )


class Kept(NamedTuple):
    """What a verdict keeps of draft tokens."""

    token_ids: tuple[int, ...]
    last_node: int
    """Index of the last one among the draft tokens; -1: none is kept."""


def kept_of(draft: DraftTokens, num_accepted: int, last_node: int | None) -> Kept:
    """The draft tokens that a verdict keeps, by what it says.

    Raises:
        ProtocolError: there is no such path.
    """
    if not 0 <= num_accepted <= len(draft.token_ids):
        raise ProtocolError(f"a verdict keeps {num_accepted} of {len(draft.token_ids)} draft tokens")
    if draft.is_chain:
        return Kept(draft.token_ids[:num_accepted], num_accepted - 1)
    if last_node is None:
        path = draft.first_path[:num_accepted]
    else:
        path = draft.path(last_node) if last_node < len(draft.token_ids) else ()
    if len(path) != num_accepted:
        raise ProtocolError(
            f"a verdict keeps {num_accepted} draft tokens up to node {last_node} of a tree with parents "
            f"{draft.parents}"
        )
    return Kept(tuple(draft.token_ids[node] for node in path), path[-1] if path else -1)


def verdict_on_tree(draft: DraftTokens, last_node: int) -> TreeVerdict | None:
    """What a verdict says of a tree, besides its last accepted node; None: it is a chain."""
    if draft.is_chain:
        return None
    path, first = draft.path(last_node), draft.first_path
    return TreeVerdict(len(draft), len(path), len(first), sum(map(eq, path, first)))


def fitting_draft(draft: DraftTokens, *, room: int, depth: int) -> DraftTokens:
    """The part of a draft that a step has room for.

    Args:
        room: most draft tokens.
        depth: most of them that can be of use, one after the other.
    """
    if draft.is_chain:
        return draft.first(max(0, min(room, depth)))
    return draft.within(max(0, depth)).first(max(0, room))


def usable_draft(draft: DraftTokens, *, most: int, vocab_size: int, needs_probs: bool) -> DraftTokens:
    """Cuts what the target must not be given: foreign tokens, and draft tokens without their distributions.

    A draft may have more token ids than the target: both pad their weights as they like. Of a tree that was
    sampled, only the first chain is verified.

    Args:
        most: draft tokens, one after the other, that were asked for.
        vocab_size: token ids of the target.
        needs_probs: the request is verified by rejection; otherwise distributions are dropped.
    """
    draft = draft.within(most)
    if needs_probs:
        if not draft.probs:
            return NO_DRAFT
        draft = draft.first_chain()
    elif draft.probs:
        draft = DraftTokens(draft.token_ids, draft.parents)
    supports = [row.token_ids for row in draft.probs]
    if all(_are_known(ids, vocab_size) for ids in (draft.token_ids, *supports)):
        return draft
    if not draft.is_chain:
        return draft.without([not _are_known((token_id,), vocab_size) for token_id in draft.token_ids])
    # What was sampled must not decide where a chain ends, so it ends where a foreign token might have been.
    possible = supports or [()] * len(draft)
    nodes = [(token_id, *ids) for token_id, ids in zip(draft.token_ids, possible, strict=True)]
    return draft.first(next(index for index, ids in enumerate(nodes) if not _are_known(ids, vocab_size)))


def _are_known(token_ids: Sequence[int], vocab_size: int) -> bool:
    return not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size
