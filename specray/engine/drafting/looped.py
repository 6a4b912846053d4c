"""Proposals of a draft on a device, whose forwards and draws run as one piece of captured work.

What a loop cannot draw goes the usual way, a forward and a draw at a time: penalties and grammars, whose next
draw depends on the host, adapters, and proposals for which nothing was captured at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from specray.engine.cache.sequence import EngineSequence
from specray.engine.drafting.chains import Chain
from specray.engine.inputs import SequenceInput
from specray.engine.runner.draft_loop import (
    MAX_WIDTH,
    DraftLoop,
    LoopAnswer,
    LoopRow,
    LoopShape,
    loop_shapes,
)
from specray.engine.runner.runner import ModelRunner
from specray.engine.sampling.device.rows import key_words, row_settings
from specray.engine.sampling.device.sampler import truncated_token
from specray.engine.sampling.device.select import choose_kernels
from specray.engine.sampling.draft import DraftToken
from specray.engine.sampling.noise import NoiseKey, Purpose
from specray.engine.sampling.processors import cuts_tail, shifts_logits
from specray.engine.sampling.verify import draw_keys
from specray.engine.sampling.vocabulary import TrimmedVocabulary
from specray.engine.step import SequenceRows

_log = logging.getLogger(__name__)

START_LIMIT_S = 20.0
"""Seconds in which proposals are captured at the start."""
JUDGED_TOKENS = 4
"""Draft tokens that are drawn before the host sees whether a proposal ends: captured work runs to its end."""


class LoopedProposals:
    """Runs the proposals of one draft engine.

    Args:
        runner: computes what a loop does not, such as prompts.
        max_num_batched_tokens: rows of one forward, at most.
    """

    def __init__(self, runner: ModelRunner, loop: DraftLoop, *, max_num_batched_tokens: int) -> None:
        self._runner = runner
        self._loop = loop
        self._max_rows = max_num_batched_tokens

    @property
    def shapes(self) -> tuple[LoopShape, ...]:
        return self._loop.shapes

    def propose(self, proposing: Sequence[tuple[EngineSequence, Chain]]) -> bool:
        """Draws all chains to their end, if a loop can.

        Returns:
            False where it cannot; nothing has happened then.
        """
        growing = _growing(proposing)
        shape = self._shape([chain for _, chain in growing])
        if shape is None or any(sequence.adapter_slot >= 0 for sequence, _ in proposing):
            return False
        self._compute_prompts(proposing)
        self._runner.settle_moves()
        while growing:
            self._grow(shape, growing)
            growing = _growing(growing)
            # What was captured for all of them is there for those that are left.
            shape = self._shape([chain for _, chain in growing]) or shape
        return True

    def _grow(self, shape: LoopShape, growing: Sequence[tuple[EngineSequence, Chain]]) -> None:
        """Draws as many tokens as the shape has, or as a chain still wants."""
        inputs = [sequence.token_ids[sequence.num_computed_tokens :] for sequence, _ in growing]
        counts = [min(chain.num_left, shape.num_tokens) for _, chain in growing]
        rows, first = [], 0
        for (sequence, _), own in zip(growing, inputs, strict=True):
            start, block_ids = sequence.num_computed_tokens, sequence.block_table.block_ids
            rows.append(SequenceRows(first, len(own), start, block_ids))
            first += len(own)
        answer = self._loop.run(
            shape,
            rows,
            [token for own in inputs for token in own],
            [_loop_row(chain, count) for (_, chain), count in zip(growing, counts, strict=True)],
        )
        for index, ((sequence, chain), count) in enumerate(zip(growing, counts, strict=True)):
            _take(sequence, chain, index, count, answer)

    def _shape(self, chains: Sequence[Chain]) -> LoopShape | None:
        if not chains or len(chains) * MAX_WIDTH > self._max_rows:
            return None
        groups = [chain.group for chain in chains]
        if any(group.sampling.grammar is not None or shifts_logits(group) for group in groups):
            return None
        most = max(chain.num_left for chain in chains)
        if any(chain.is_judged for chain in chains):
            most = min(most, JUDGED_TOKENS)
        return self._loop.shape_for(
            len(chains),
            most,
            cuts=any(cuts_tail(group.sampling) for group in groups),
            truncates=any(group.sampling.draws_by_rejection for group in groups),
        )

    def _compute_prompts(self, proposing: Sequence[tuple[EngineSequence, Chain]]) -> None:
        inputs: list[SequenceInput] = []
        left = self._max_rows
        for sequence, chain in proposing:
            end = len(sequence.token_ids) - (not chain.is_full)
            if chain.is_full or sequence.num_missing_tokens > MAX_WIDTH:
                while (start := sequence.num_computed_tokens) < end:
                    stop = min(end, start + left)
                    own = sequence.token_ids[start:stop]
                    inputs.append(SequenceInput(own, start, sequence.block_table.block_ids, 0))
                    sequence.num_computed_tokens = stop
                    left -= stop - start
                    if left == 0:
                        self._runner.run(inputs)
                        inputs, left = [], self._max_rows
        if inputs:
            self._runner.run(inputs)


def _growing(proposing: Sequence[tuple[EngineSequence, Chain]]) -> list[tuple[EngineSequence, Chain]]:
    return [(sequence, chain) for sequence, chain in proposing if not chain.is_full]


def _loop_row(chain: Chain, num_wanted: int) -> LoopRow:
    group = chain.group
    sampling = group.sampling
    draft_key = NoiseKey(sampling.seed, group.first_position, Purpose.DRAFT_DRAW)
    return LoopRow(
        num_wanted,
        _words(draw_keys(group)[0]),
        row_settings(group),
        _words(draft_key) if sampling.draws_by_rejection else None,
    )


def _words(key: NoiseKey | None) -> tuple[int, int, int]:
    seed, position, purpose = key_words([key])[0].tolist()
    return seed, position, purpose


def _take(sequence: EngineSequence, chain: Chain, index: int, count: int, answer: LoopAnswer) -> None:
    """Gives a chain what was drawn for it, until it ends."""
    # Of the draft tokens all but the last were computed, whether or not the chain keeps them.
    num_computed = len(sequence.token_ids) + count - 1
    for place in range(count):
        if chain.is_full:
            break
        token_id, lead = answer.token_ids[place][index], answer.leads[place][index]
        if chain.state.sampling.draws_by_rejection:
            chain.take(truncated_token([token_id, *answer.truncated[place][index]]))
        else:
            chain.take(DraftToken(token_id, None, lead))
    sequence.num_computed_tokens = min(len(sequence.token_ids), num_computed)


def looped_proposals(
    runner: ModelRunner,
    *,
    max_num_draft_probs: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_num_tokens: int | None = None,
    limit_s: float = START_LIMIT_S,
) -> LoopedProposals | None:
    """Makes and captures the loops of a runner whose forwards are captured; None: they are not, or layers
    are recurrent, whose records the host counts.

    Args:
        max_num_batched_tokens: rows of one forward, at most.
        max_num_seqs: sequences of one batch, at most.
        max_num_tokens: draft tokens of a proposal, at most; None: any number.
        limit_s: seconds for all captures.
    """
    graphs, info = runner.graphs, runner.info
    if graphs is None or runner.is_group or runner.states is not None:
        return None
    loop = DraftLoop(
        runner.forward,
        runner.cache,
        max_model_len=info.max_model_len,
        kernels=choose_kernels(info.device),
        capture=graphs.capture,
        known=known_tokens(runner),
        max_num_draft_probs=max_num_draft_probs,
    )
    max_num_sequences = min(max_num_seqs, max_num_batched_tokens // MAX_WIDTH)
    loop.prepare(loop_shapes(max_num_sequences, max_num_tokens), limit_s)
    return LoopedProposals(runner, loop, max_num_batched_tokens=max_num_batched_tokens)


def known_tokens(runner: ModelRunner) -> Callable[[torch.Tensor], torch.Tensor]:
    """Turns a forward's logits into rows of all tokens that may be drawn."""
    info = runner.info
    if info.token_ids is not None:
        return TrimmedVocabulary(info.token_ids, vocab_size=info.vocab_size, device=info.device).whole
    num_known = min(info.vocab_size, info.num_token_ids or info.vocab_size)
    return lambda logits: logits[:, :num_known]
