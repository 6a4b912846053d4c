"""A prefix's sampling state equals what its tokens give when counted afresh."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.cache.sequence import EngineSequence
from specray.engine.sampling.processors import process_logits
from specray.engine.sampling.state import SamplingState, chain_rows
from specray.types import SamplingParams

VOCAB_SIZE = 7
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6)
KINDS = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.5, frequency_penalty=-0.2, num_prompt_tokens=4),
    SamplingParams(
        repetition_penalty=0.8, frequency_penalty=1.0, num_prompt_tokens=3, min_tokens=5, stop_token_ids=(2,)
    ),
)


def check(state: SamplingState, token_ids: list[int]) -> None:
    sampling = state.sampling
    assert state.length == len(token_ids)
    if sampling.repetition_penalty != 1.0:
        assert state.counts == Counter(token_ids)
    else:
        assert state.counts is None
    if sampling.presence_penalty or sampling.frequency_penalty:
        assert state.output_counts == Counter(token_ids[sampling.num_prompt_tokens :])
    else:
        assert state.output_counts is None


class States(RuleBasedStateMachine):
    """Any number of states, forked from each other, beside the tokens that each has seen."""

    states = Bundle("states")

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[tuple[SamplingState, list[int]]] = []

    @initialize(target=states, kind=st.sampled_from(KINDS), prompt=TOKENS)
    def begin(self, kind: SamplingParams, prompt: list[int]) -> int:
        return self._add(SamplingState(kind, prompt), prompt)

    def _add(self, state: SamplingState, token_ids: list[int]) -> int:
        self.tokens.append((state, list(token_ids)))
        return len(self.tokens) - 1

    @rule(index=states, token_ids=TOKENS)
    def advance(self, index: int, token_ids: list[int]) -> None:
        state, seen = self.tokens[index]
        state.advance(token_ids)
        seen += token_ids

    @rule(index=states, length=st.integers(0, 20))
    def truncate(self, index: int, length: int) -> None:
        state, seen = self.tokens[index]
        state.truncate(length)
        del seen[length:]

    @rule(target=states, index=states)
    def fork(self, index: int) -> int:
        state, seen = self.tokens[index]
        return self._add(state.fork(), seen)

    @rule(index=states, drafted=TOKENS)
    def process(self, index: int, drafted: list[int]) -> None:
        """Rows behind the state are those of a state that is made for each of them."""
        state, seen = self.tokens[index]
        logits = torch.randn(len(drafted) + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
        processed = process_logits(logits, [chain_rows(state, drafted)])
        for row in range(len(drafted) + 1):
            alone = SamplingState(state.sampling, [*seen, *drafted[:row]])
            expected = process_logits(logits[row : row + 1], [chain_rows(alone)])
            torch.testing.assert_close(processed[row : row + 1], expected, atol=0, rtol=0)

    @invariant()
    def every_state_is_that_of_its_tokens(self) -> None:
        for state, seen in self.tokens:
            check(state, seen)


TestStates = States.TestCase
TestStates.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_a_sequence_keeps_the_state_of_what_was_told(kind: SamplingParams, seed: int) -> None:
    """Through tails, acceptance and rollback, whether it is looked at between them or not."""
    source = random.Random(seed)
    sequence = EngineSequence("a", kind, BlockTable(BlockAllocator(1, 64)))

    def some() -> list[int]:
        # Few tokens, so that what is told often equals the tail.
        return [source.randrange(2) for _ in range(source.randrange(5))]

    for _ in range(200):
        action = source.randrange(4)
        if action == 0:
            sequence.replace_tail(source.randint(0, sequence.num_tokens), some())
        elif action == 1:
            sequence.set_tail(some())
        elif action == 2:
            sequence.accept_tail(source.randint(0, len(sequence.token_ids) - sequence.num_tokens))
        else:
            sequence.truncate(source.randint(0, len(sequence.token_ids)))
        if source.random() < 0.5:
            check(sequence.committed_state, sequence.token_ids[: sequence.num_tokens])
    sequence.set_sampling(KINDS[3])
    check(sequence.committed_state, sequence.token_ids[: sequence.num_tokens])
