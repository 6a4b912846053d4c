"""The draft engine: keeps and appends tokens, then proposes, or drafts the likely outcomes of a round.

A batch is a set of *chains*, each of which grows by one draft token per step, all in one ragged forward. A
proposal is one chain. Outcomes begin with one forward over the tokens under verification, whose logits rank
the next tokens; each (number accepted, next token) is then a chain of its own, a branch of the sequence. A
proposal may also be a tree (``trees``), whose nodes of one depth are rows of the same forwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specray.config import PrefixCache
from specray.engine.base import RunnerEngine, Speculating
from specray.engine.cache.adapters import LoadedAdapters
from specray.engine.cache.sequence import EngineSequence
from specray.engine.drafting.chains import Chain, OutcomeBranches
from specray.engine.drafting.draws import DraftDraws
from specray.engine.drafting.guesses import Guesser
from specray.engine.drafting.states import one_chain, with_records
from specray.engine.drafting.trees import DraftTree, TreeRow
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.sampling.sampler import Sampler, make_sampler
from specray.engine.schedule import BranchStep, CatchUp, Runner, catch_up, check_speculation, wanted_rows
from specray.engine_info import EngineInfo
from specray.types import DraftReply, Outcomes, Proposal, SpeculateItem

if TYPE_CHECKING:
    from specray.engine.drafting.looped import LoopedProposals


@dataclass(slots=True, eq=False)
class _Proposing:
    """An item that asks for a proposal."""

    sequence: EngineSequence
    chain: Chain

    def catch_up(self, guess: Sequence[int]) -> CatchUp:
        """All missing tokens and some guesses after them, with a row for each token that is drawn."""
        return CatchUp(self.sequence, 1 + len(guess), extra_token_ids=guess)


Task = _Proposing | DraftTree | OutcomeBranches
"""An admitted item."""


class DraftEngine(Speculating[Task], RunnerEngine):
    """Implements ``interfaces.SyncDraftEngine`` over a runner.

    Args:
        runner, info, prefix_cache: see :class:`RunnerEngine`.
        device: device of the runner's logits.
        max_num_draft_probs: support of the sparse draft distribution under rejection verification.
        grammars: masks for requests with a grammar; None: their draft tokens are drawn without.
        num_token_ids: token ids up to the tokenizer's last one; those after it are padding, and never
            proposed. None: all may be.
        token_ids: of the logits, ascending; None: of all tokens.
        sampler: draws draft tokens; None: of the logits' own tokens.
        guesser: names what is computed after a chain's last token in the same forward; None: nothing.
        looped: runs proposals without guesses as captured work; None: there is none.
        adapters: that sequences may have; None: they have none.
    """

    def __init__(
        self,
        runner: Runner,
        info: EngineInfo,
        *,
        device: torch.device,
        max_num_draft_probs: int = 64,
        prefix_cache: PrefixCache = True,
        grammars: GrammarMasks | None = None,
        num_token_ids: int | None = None,
        token_ids: NDArray[np.int64] | None = None,
        sampler: Sampler | None = None,
        guesser: Guesser | None = None,
        looped: LoopedProposals | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        super().__init__(
            runner,
            info,
            can_evict=True,
            prefix_cache=prefix_cache,
            grammars=grammars,
            adapters=adapters,
        )
        self._guesser = guesser
        self._looped = looped if guesser is None else None
        self._num_item_ids = info.vocab_size
        """Token ids of what is proposed, which may be others than those of the sequences."""
        sampler = sampler or make_sampler(
            info.vocab_size,
            device,
            max_num_draft_probs,
            num_token_ids=num_token_ids,
            token_ids=token_ids,
        )
        self._draws = DraftDraws(sampler, grammars)

    def release(self, request_ids: Sequence[str]) -> None:
        super().release(request_ids)
        if self._guesser is not None:
            self._guesser.release(request_ids)

    def close(self) -> None:
        """Closes the runner, and what guesses for it; idempotent."""
        super().close()
        if self._guesser is not None:
            self._guesser.close()

    def _work(self, tasks: Sequence[Task]) -> None:
        """Runs the tasks: one forward for first draft tokens and rankings, then a step per further token."""
        proposing = [task for task in tasks if isinstance(task, _Proposing)]
        trees = [task for task in tasks if isinstance(task, DraftTree)]
        outcomes = [task for task in tasks if isinstance(task, OutcomeBranches)]
        looped = self._looped if len(proposing) == len(tasks) else None
        if looped is not None and looped.propose([(task.sequence, task.chain) for task in proposing]):
            return
        rows = [row for tree in trees for row in tree.rows()]
        growing = [task for task in proposing if not task.chain.is_full]
        guesses = self._guess([task.chain for task in growing])
        work = [task.catch_up(guess) for task, guess in zip(growing, guesses, strict=True)]
        work += [CatchUp(task.sequence, 0) for task in proposing if task.chain.is_full]
        work += [CatchUp(tree.sequence, min(1, tree.num_wanted)) for tree in trees]
        work += [task.catch_up() for task in outcomes]
        logits = self._catch_up(work)
        outcome = [task for task in outcomes if task.num_rows > 0]
        if logits is None:
            return
        end = len(growing) + sum(map(len, guesses))
        if growing:
            self._draw_behind(logits[:end], growing, (), guesses)
        if rows:
            self._draws.spread(logits[end : end + len(rows)], rows)
        if outcome:
            self._draws.rank(logits[end + len(rows) :], outcome)
        self._grow(growing, trees, outcome)
        for task in outcome:
            task.settle(drew_behind_masks=self._has_masks)

    # ---- schedule

    def _admit(self, item: SpeculateItem) -> Task | None:
        """Gives the sequence its tokens and its room; raises before anything changed."""
        length = item.base_len + len(item.token_ids)
        check_speculation(item, self._info, num_item_ids=self._num_item_ids)
        if self._states is not None:
            item = one_chain(item, self._states.max_open)
        return self._admit_outcomes(item, length) if item.fanout else self._admit_proposal(item, length)

    def _admit_proposal(self, item: SpeculateItem, length: int) -> _Proposing | DraftTree:
        num_wanted = min(item.num_speculative_tokens, self._info.max_model_len - length)
        sequence = self._keep_and_append(item, num_wanted)
        sequence.set_tail(())
        sequence.recompute_last(min(1, num_wanted))
        self._back_to_state(sequence)
        # Behind masks nodes of one depth could not differ, and behind a state there is one token.
        can_branch = self._states is None and not self._has_masks
        if item.tree is not None and not sequence.sampling.draws_by_rejection and can_branch:
            return DraftTree(sequence, item.tree, num_wanted, min_acceptance=item.min_acceptance)
        # Log of 0 is minus infinity: no bound.
        min_logprob = math.log(item.min_acceptance) if item.min_acceptance > 0 else -math.inf
        chain = Chain(
            sequence.committed_state.fork(),
            sequence.token_ids,
            num_wanted,
            sequence=sequence,
            min_logprob=min_logprob,
        )
        return _Proposing(sequence, chain)

    def _admit_outcomes(self, item: SpeculateItem, length: int) -> OutcomeBranches:
        first, last = wanted_rows(item, self._info.max_model_len)
        proposed = item.proposed_token_ids[: max(last, 0)]
        num_extra = min(len(proposed) + 1 + item.num_speculative_tokens, self._info.max_model_len - length)
        sequence = self._keep_and_append(item, num_extra)
        sequence.set_tail([sequence.own_id(token_id) for token_id in proposed])
        outcome = OutcomeBranches(item, sequence, first, last, self._info.max_model_len)
        sequence.recompute_last(last - first + 1)
        self._back_to_state(sequence)
        return outcome

    def _keep_and_append(self, item: SpeculateItem, num_extra_tokens: int) -> EngineSequence:
        return self.table.keep_and_append(
            item.request_id,
            item.base_len,
            item.token_ids,
            item.sampling,
            num_extra_tokens=num_extra_tokens,
        )

    # ---- run

    def _catch_up(self, work: Sequence[CatchUp | BranchStep]) -> Tensor | None:
        if self._states is not None:
            work = [with_records(item, self._states) for item in work if isinstance(item, CatchUp)]
        output = catch_up(self._runner, work, self._info.max_num_batched_tokens)
        return None if output is None or not len(output.logits) else output.logits

    def _grow(
        self,
        proposing: Sequence[_Proposing],
        trees: Sequence[DraftTree],
        outcomes: Sequence[OutcomeBranches],
    ) -> None:
        """Continues all chains and trees together until each has its tokens."""
        before: Sequence[_Proposing] = ()
        while True:
            proposing = [task for task in proposing if not task.chain.is_full]
            branches = [(outcome, outcome.growing) for outcome in outcomes]
            own: list[Chain] = [branch for _, growing in branches for branch in growing]
            chains = [task.chain for task in proposing] + own
            rows: list[TreeRow] = []
            guesses: Sequence[Sequence[int]] = [()] * len(chains)
            logits = self._advance(before) if before and chains else None
            if logits is None:
                guesses = self._guess(chains)
                behind = iter(guesses)
                work: list[CatchUp | BranchStep] = [task.catch_up(next(behind)) for task in proposing]
                for outcome, growing in branches:
                    work += [outcome.work(growing, [next(behind) for _ in growing])] if growing else []
                for tree in trees:
                    nodes, step = tree.step()
                    rows += nodes
                    work += [] if step is None else [step]
                if not work:
                    return
                logits = self._catch_up(work)
            assert logits is not None, "every chain wants a logits row"
            end = len(chains) + sum(map(len, guesses))
            if chains:
                self._draw_behind(logits[:end], proposing, own, guesses)
            if rows:
                self._draws.spread(logits[end:], rows)
            # Without branches and guesses, and in one forward each, a step follows from the one before.
            is_simple = not outcomes and not trees and len(chains) <= self._info.max_num_batched_tokens
            before = proposing if is_simple and self._guesser is None else ()

    @property
    def _has_masks(self) -> bool:
        return self._guesser is not None and self._guesser.are_masks

    def _guess(self, chains: Sequence[Chain]) -> Sequence[Sequence[int]]:
        if self._guesser is None or not chains:
            return [()] * len(chains)
        return self._guesser.guess(chains)

    def _draw_behind(
        self,
        logits: Tensor,
        proposing: Sequence[_Proposing],
        branches: Sequence[Chain],
        guesses: Sequence[Sequence[int]],
    ) -> None:
        """Draws what follows each chain's last token and its guesses, as far as these are what was drawn."""
        chains = [*(task.chain for task in proposing), *branches]
        if not any(guesses):
            self._draws.draw(logits, chains)
            return
        lengths = [len(chain.drawn) for chain in chains]
        starts = [0, *accumulate(1 + len(guess) for guess in guesses)]
        going: Sequence[int] = range(len(chains))
        for depth in range(1 + max(map(len, guesses))):
            going = [
                index
                for index in going
                if depth <= len(guesses[index])
                and not chains[index].is_full
                and (
                    depth == 0 or self._has_masks or chains[index].token_ids[-1] == guesses[index][depth - 1]
                )
            ]
            if not going:
                break
            rows = torch.tensor([starts[index] + depth for index in going], device=logits.device)
            self._draws.draw(logits[rows], [chains[index] for index in going])
        if self._has_masks:
            return
        for task, length in zip(proposing, lengths, strict=False):
            # All drawn now but the last were computed as guesses.
            task.sequence.num_computed_tokens += max(0, len(task.chain.drawn) - length - 1)

    def _advance(self, before: Sequence[_Proposing]) -> Tensor | None:
        """Next decode step of the unfinished chains; None: it needs a new plan."""
        kept = [index for index, task in enumerate(before) if not task.chain.is_full]
        sequences = [before[index].sequence for index in kept]
        output = self._runner.advance(kept, [sequence.token_ids[-1] for sequence in sequences])
        if output is None:
            return None
        for sequence in sequences:
            sequence.num_computed_tokens = len(sequence.token_ids)
        return output.logits

    def _reply(self, item: SpeculateItem, task: Task | None) -> DraftReply:
        if task is None:
            return super()._reply(item, task)
        if isinstance(task, OutcomeBranches):
            branches = tuple(branch.reply for branch in task.branches)
            return Outcomes(item.request_id, item.round_id, item.base_len, branches)
        drawn = task.settle() if isinstance(task, DraftTree) else task.chain.drawn_tokens
        return Proposal(item.request_id, item.round_id, item.base_len, drawn)
