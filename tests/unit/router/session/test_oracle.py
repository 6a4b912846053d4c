"""Any order of a session's edges at once, against a sequential oracle."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specray.fakes import FakeDraft, FakeTarget, NoisyGuesser
from specray.requests import FinishReason
from specray.router.session.session import Session
from specray.types import Outcomes, Proposal, Verdict
from tests.unit.router.harness import MODEL, expected, request
from tests.unit.router.session.harness import PROMPT, ROOM


class SessionMachine(RuleBasedStateMachine):
    """Any order of sends, answers, losses and doubles: the output is the oracle's."""

    def __init__(self) -> None:
        super().__init__()
        self.request = request("a", PROMPT, 20, temperature=1.0, seed=77)
        self.oracle = expected(self.request)
        self.session = Session(self.request, None, vocab_size=64)
        self.target = FakeTarget(MODEL)
        self.draft = FakeDraft(NoisyGuesser(MODEL, agreement=0.5))
        self.target_replies: list[Any] = []
        self.draft_replies: list[Any] = []

    @property
    def can_verify(self) -> bool:
        return self.session.target.in_flight is None and not self.session.is_finished

    @precondition(lambda self: self.can_verify)
    @rule(room=st.integers(min_value=1, max_value=12))
    def verify(self, room: int) -> None:
        self.target_replies += self.target.verify([self.session.verify_item(room)]).replies

    @precondition(lambda self: self.can_verify and self.session.drafted is None)
    @rule(k=st.integers(min_value=0, max_value=5))
    def propose(self, k: int) -> None:
        self.draft_replies += self.draft.speculate([self.session.proposal_item(k)]).replies

    @precondition(
        lambda self: (
            self.session.draft.in_flight is None
            and self.session.draft.synced_len < len(self.session.committed)
        )
    )
    @rule(num_tokens=st.integers(min_value=1, max_value=12))
    def read(self, num_tokens: int) -> None:
        self.draft_replies += self.draft.speculate([self.session.prefill_chunk_item(num_tokens)]).replies

    @precondition(
        lambda self: self.session.target.in_flight is not None and self.session.target.in_flight.sample
    )
    @rule(k=st.integers(min_value=0, max_value=5), width=st.integers(min_value=0, max_value=3))
    def speculate_ahead(self, k: int, width: int) -> None:
        verifying = self.session.target.in_flight
        assert verifying is not None
        fanout = (width,) * len(verifying.draft.token_ids) + (1,)
        self.draft_replies += self.draft.speculate([self.session.outcomes_item(k, fanout)]).replies

    @precondition(lambda self: self.target_replies)
    @rule(pick=st.randoms(use_true_random=False), is_doubled=st.booleans())
    def target_answers(self, pick: random.Random, is_doubled: bool) -> None:
        reply = pick.choice(self.target_replies)
        if not is_doubled:
            self.target_replies.remove(reply)
        if isinstance(reply, Verdict):
            self.session.on_verdict(reply)
        else:
            self.session.on_target_refused(reply)

    @precondition(lambda self: self.draft_replies)
    @rule(pick=st.randoms(use_true_random=False), is_doubled=st.booleans(), is_lost=st.booleans())
    def draft_answers(self, pick: random.Random, is_doubled: bool, is_lost: bool) -> None:
        reply = pick.choice(self.draft_replies)
        if not is_doubled:
            self.draft_replies.remove(reply)
        if is_lost:
            return
        if isinstance(reply, Proposal):
            self.session.on_proposal(reply)
        elif isinstance(reply, Outcomes):
            self.session.on_outcomes(reply)
        else:
            self.session.on_draft_refused(reply)

    @precondition(lambda self: self.session.is_waiting_for_draft)
    @rule()
    def patience_ends(self) -> None:
        self.session.skip_draft()

    @rule()
    def target_forgets(self) -> None:
        self.target.forget()

    @rule()
    def draft_forgets(self) -> None:
        self.draft.forget()

    @rule()
    def target_is_lost(self) -> None:
        self.target.forget()
        self.session.lose_target()

    @rule()
    def draft_is_lost(self) -> None:
        self.draft.forget()
        self.session.lose_draft()

    @invariant()
    def output_is_the_oracles(self) -> None:
        session = self.session
        output = session.committed[session.num_prompt_tokens :]
        assert tuple(output) == self.oracle[: len(output)]
        assert session.is_finished == (len(output) == self.request.max_tokens)
        tally = session.tally
        assert tally.num_verified_tokens == tally.num_accepted_tokens + tally.num_rounds == len(output)
        assert session.target.synced_len <= len(session.committed)
        assert session.draft.synced_len <= len(session.committed)

    def teardown(self) -> None:
        """From any state the session can be driven to its end: nothing is awaited for ever."""
        self.target.forget()
        self.session.lose_target()
        self.session.lose_draft()
        for _ in range(2 * self.request.max_tokens + 8):
            if self.session.is_finished:
                break
            for reply in self.target.verify([self.session.verify_item(ROOM)]).replies:
                assert isinstance(reply, Verdict)
                self.session.on_verdict(reply)
        assert self.session.finish_reason is FinishReason.LENGTH


TestSessionAgainstOracle = SessionMachine.TestCase
TestSessionAgainstOracle.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
