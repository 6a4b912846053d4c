"""The vocabulary that crosses boundaries: what the router says to the two engines, and what they answer.

Everything here is plain, frozen and free of imports but those of draft tokens and features, so that router,
engines, RPC and fakes can share it. A message is an *item* (router to engine) or a *reply* (engine to
router).

Every item says: *keep your first* ``base_len`` *tokens, append* ``token_ids``, *compute what is missing, then
propose (draft) or verify (target)*. Prefill is ``base_len = 0`` plus the prompt; rollback is a smaller
``base_len``; a retry is the same item again; a worker that lost its state answers ``UnknownSequence`` and
gets everything again with ``base_len = 0``.

``round_id`` counts the items of one session and engine, and replies echo it. ``base_len`` alone cannot tell a
late reply to the first prefill from the reply to a recovery that also starts at 0.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final

from specray.draft_tokens import NO_DRAFT, DraftTokens, LookaheadBudget, TreeBudget
from specray.feature_rows import FeatureRows

MAX_SPECULATIVE_TOKENS: Final = 32
"""Largest K: most draft tokens per round that a configuration or a request may ask for."""

ADAPTER: Final = "adapter"
"""Name of the field that says which adapter a request wants."""


class Verification(enum.StrEnum):
    """How draft tokens are accepted; the target's output distribution is exactly preserved."""

    COUPLED = "coupled"
    """Target and draft draw with shared position-keyed Gumbel noise; greedy at temperature 0."""
    REJECTION = "rejection"
    """Accept with min(1, target_prob / draft_prob), else sample the residual; greedy at temperature 0."""


class Overlap(enum.StrEnum):
    """What the draft does while the target verifies."""

    SERIAL = "serial"
    AHEAD = "ahead"
    ENUMERATE = "enumerate"


class DraftKind(enum.StrEnum):
    """What proposes for a request."""

    MODEL = "model"
    """A draft model."""
    NGRAM = "ngram"
    """Tokens that followed the last ones when they came before in the same request; no model."""
    SUFFIX = "suffix"
    """Tokens that followed the last ones most often, there or in the tenant's past outputs; no model."""
    LOOKAHEAD = "lookahead"
    """N-grams that the target makes of its own guesses with each step (Jacobi); no model."""
    FEATURES = "features"
    """A drafter on the target, which uses the target's features."""


class GrammarKind(enum.StrEnum):
    """The language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    LARK = "lark"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that the output must belong to; its state is a function of the output's token ids."""

    kind: GrammarKind
    source: str
    """A JSON schema as JSON text, a Lark grammar, or a regular expression; checked by the ingress."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's next token is drawn at every position; travels to an engine once per sequence.

    All processors are applied per position with the state of exactly that position's prefix. Meaning
    and allowed values of a field are those of the option of the same name in ``request_options``; the Ingress
    checks them.
    """

    temperature: float = 1.0
    top_k: int = 0
    """0: all tokens remain."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and a bias."""
    seed: int = 0
    """Key of all noise, 64 bits; the ingress draws one when the user gives none."""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output (end-of-sequence included unless the request ignores it)."""
    num_prompt_tokens: int = 0
    """Tokens before the output: penalties and min_tokens need their number."""
    num_logprobs: int | None = None
    """Likeliest tokens with logprobs besides the chosen token; None: no logprobs."""
    num_prompt_logprobs: int | None = None
    """Likeliest tokens with logprobs besides each prompt token; None: the prompt has none. The prefix cache
    is of no use to such a prompt."""
    verification: Verification = Verification.COUPLED
    grammar: Grammar | None = None
    """Language that the output belongs to, stop tokens aside; None: free text."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that the output may have; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output must not contain: the last token of one is impossible after the
    others, unless that would leave no token at all."""
    cache_salt: str = ""
    adapter: bytes = b""
    """Digest of the adapter that changes the model's weights, 32 bytes; empty: the base."""
    message_borders: tuple[int, ...] = ()
    """Prompt tokens before some of its last messages' borders, ascending: where the next prompt of the same
    conversation may become another. Empty: none are known."""

    @property
    def is_greedy(self) -> bool:
        """True when the output is the argmax at every position."""
        return self.temperature == 0.0

    @property
    def draws_by_rejection(self) -> bool:
        """True when a draw of its own decides whether a draft token is accepted."""
        return self.verification is Verification.REJECTION and not self.is_greedy


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs (natural log, of the model's distribution before processors) of one output position."""

    token_id: int
    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SpeculateItem:
    """Router to draft: keep, append, then propose.

    Without ``proposed_token_ids`` the draft answers a :class:`Proposal` of up to ``num_speculative_tokens``
    tokens after the committed ones. With them (the proposal now under verification, or empty with a fan-out)
    and a ``fanout`` it answers :class:`Outcomes`: for each number n of accepted tokens, continuations for
    at most ``fanout[n]`` next tokens; in all for the ``max_branches`` outcomes that it finds likeliest. Of a
    tree, ``fanout[n]`` are those after its node n - 1.

    A *prefill chunk* asks for nothing: the draft computes its tokens and answers an empty Proposal.
    """

    request_id: str
    round_id: int
    base_len: int
    token_ids: tuple[int, ...]
    num_speculative_tokens: int
    proposed_token_ids: tuple[int, ...] = ()
    fanout: tuple[int, ...] = ()
    """F_0..F_K for K = len(proposed_token_ids); empty means: answer a Proposal."""
    sampling: SamplingParams | None = None
    """Present when base_len is 0."""
    max_branches: int = 0
    """0: as many as ``fanout`` allows."""
    min_acceptance: float = 0.0
    """Probability in [0, 1) at which a Proposal ends: before the token by which the chance that all of it is
    accepted, as the draft estimates it, would fall below. The first token is always there. Without effect
    under rejection, where draft tokens must not be chosen by what they are. Of a tree: no node is added where
    the chance that one of its leaves is reached would be below."""
    tree: TreeBudget | None = None
    """Answer a Proposal with a tree, whose paths have at most ``num_speculative_tokens``; None: with a chain,
    as always under rejection."""
    features: FeatureRows | None = None
    """Features of tokens that the draft holds with this item, if it uses features; None: no new ones."""
    proposed_parents: tuple[int, ...] | None = None
    """Index of the parent of each proposed token, where they are a tree: as ``DraftTokens`` has them, the
    nodes of the first chain before the others. None: a chain."""

    @property
    def proposed(self) -> DraftTokens:
        return DraftTokens(self.proposed_token_ids, self.proposed_parents)

    def of_first_chain(self) -> SpeculateItem:
        """The same, of the first chain of the tree under verification alone."""
        if self.proposed_parents is None:
            return self
        num_tokens = len(self.proposed.first_path)
        return replace(
            self,
            proposed_token_ids=self.proposed_token_ids[:num_tokens],
            fanout=self.fanout[: num_tokens + 1],
            proposed_parents=None,
        )

    @property
    def is_prefill_chunk(self) -> bool:
        return self.num_speculative_tokens == 0 and not self.fanout

    @property
    def max_draft_nodes(self) -> int:
        """Most draft tokens of a Proposal, or of each branch."""
        return self.num_speculative_tokens if self.tree is None else self.tree.num_nodes


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft to router: tokens to verify after the ``base_len + len(token_ids)`` tokens of the item."""

    request_id: str
    round_id: int
    base_len: int
    draft: DraftTokens = NO_DRAFT


@dataclass(frozen=True, slots=True)
class Branch:
    """What to verify next if ``num_accepted_tokens`` are accepted and ``next_token_id`` follows them."""

    num_accepted_tokens: int
    next_token_id: int
    draft: DraftTokens = NO_DRAFT
    last_accepted_node: int | None = None
    """Index among the item's proposed tokens of the last one that is accepted. None: they are the first of
    its first chain."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Draft to router: continuations for the likely verdicts of the round under verification.

    One request may be answered by several messages; a branch holds as soon as it has arrived.
    """

    request_id: str
    round_id: int
    base_len: int
    branches: tuple[Branch, ...]


@dataclass(frozen=True, slots=True)
class UnknownSequence:
    """Engine to router: I do not have ``base_len`` tokens of this request; send everything from 0."""

    request_id: str
    round_id: int
    base_len: int


@dataclass(frozen=True, slots=True)
class ItemFailed:
    """Engine to router: this item alone cannot be served (bad item, no room); others are not affected."""

    request_id: str
    round_id: int
    base_len: int
    message: str
    is_retriable: bool
    """True: no room now, try again later. False: this request can never be served."""
    is_invalid: bool = False
    """True: by its caller's mistake, such as a grammar that cannot be enforced; never retriable."""
    field: str = ""
    """Name of the request's field that is wrong, with ``is_invalid``; empty: none in particular. Where it is
    retriable, ``ADAPTER``: the item's adapter is not loaded."""

    @property
    def lacks_adapter(self) -> bool:
        """Whether the item may be served once its adapter is loaded."""
        return self.is_retriable and self.field == ADAPTER


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """Router to target: keep, append, then verify ``draft`` and draw the token after what is accepted.

    Of a tree, one path is accepted. Of one that was sampled, as its ``probs`` say, only the first chain is
    verified; the other nodes count as rejected.
    """

    request_id: str
    round_id: int
    base_len: int
    token_ids: tuple[int, ...]
    draft: DraftTokens = NO_DRAFT
    sample: bool = True
    """False: a chunk of a prefill; only the cache is filled, and the verdict carries no token."""
    sampling: SamplingParams | None = None
    """Present when base_len is 0."""
    max_new_tokens: int | None = None
    """Most tokens that a chunk computes, >= 1; it is cut after them. Tokens found in the prefix cache do not
    count. None: all of them."""
    lookahead: LookaheadBudget | None = None
    """What the target computes with this step for the Verdict's ``draft``; None: nothing. A chunk has none,
    and rows that do not fit are left out."""
    num_next_draft_tokens: int = 0
    """Most draft tokens that the target's own drafter is asked for after the verdict, of a tree those of a
    path; 0: none. A target without a drafter drafts nothing."""
    next_min_acceptance: float = 0.0
    """Least chance that all of a chain of the drafter's is accepted, in [0, 1): see ``SpeculateItem``."""
    next_tree: TreeBudget | None = None
    """What a tree of the drafter's may have; None: a chain. Rejection gets a chain."""
    num_features: int = 0
    """Most rows of features that the verdict is to bring; 0: none. A target may give fewer, or none."""
    first_feature: int = 0
    """Token of the first of these rows."""
    runs_on: bool = False
    """True: after the verdict comes a step of its next token alone, unless the sequence ends with it. The
    target may compute that before it is asked."""

    @property
    def max_next_nodes(self) -> int:
        """Most draft tokens that may come with the verdict."""
        if self.num_next_draft_tokens == 0 or self.next_tree is None:
            return self.num_next_draft_tokens
        return self.next_tree.num_nodes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Target to router: how many draft tokens are accepted, and the token that follows them."""

    request_id: str
    round_id: int
    base_len: int
    num_accepted_tokens: int
    """Draft tokens accepted: of a chain the first ones, of a tree those of one path."""
    next_token_id: int | None
    """The recovered or bonus token; None for a prefill chunk (``sample`` was False)."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per committed token (accepted, then next) when the request asks for them."""
    held_len: int | None = None
    """Tokens held after a chunk, which may have been cut; None: all of the item."""
    num_cached_tokens: int = 0
    """Tokens of the item that were not computed but found in the prefix cache."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One per prompt token of the item, when the request asks for them; the first of all has none."""
    last_accepted_node: int | None = None
    """Index of the last accepted node of a tree. None: a chain, or the accepted nodes are the first of the
    tree's first chain."""
    draft: DraftTokens = NO_DRAFT
    """What the target itself proposes after ``next_token_id``, where the item asked for it."""
    features: FeatureRows | None = None
    """Features of committed tokens, from the item's ``first_feature`` on; None: there are none."""


DraftReply = Proposal | Outcomes | UnknownSequence | ItemFailed
TargetReply = Verdict | UnknownSequence | ItemFailed


@dataclass(frozen=True, slots=True)
class DraftReplies:
    """What one draft step answered."""

    replies: tuple[DraftReply, ...]
    forward_ns: int
    """Time of the step on the engine: forwards and sampling, without queueing and RPC."""
    is_draining: bool = False
    """The draft will end soon; the router should lease another, and may use this one until then."""


@dataclass(frozen=True, slots=True)
class TargetReplies:
    """What one target step answered."""

    replies: tuple[TargetReply, ...]
    forward_ns: int
    num_rows: int | None = None
    """Tokens that were computed; fewer than asked where the prefix cache had them. None: unknown."""
    num_experts: int | None = None
    """Distinct experts that they hit, in all layers together. None: there are none, or not counted."""
