"""What a draft computes after a chain's last token in one forward: masks, or tokens of its own draft.

Behind *masks* a model that was trained for it (PARD) predicts the tokens that follow, so that all draft
tokens of a chain come from one forward. Tokens of an *inner draft* are verified as the target verifies: the
token drawn in each row is the draft's own, and a row counts as long as the tokens before it are those drawn.
So the inner draft changes when draft tokens are there, never which they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from specray.drafting import NgramProposer
from specray.engine.cache.sequence import common_prefix_len
from specray.engine.drafting.chains import BranchChain, Chain
from specray.interfaces import SyncDraftEngine
from specray.types import Proposal, SpeculateItem, UnknownSequence


class Guesser(Protocol):
    """Names the tokens that are computed after a chain's last one."""

    are_masks: bool
    """True: all rows count. False: a row counts where the tokens before it were drawn."""

    def guess(self, chains: Sequence[Chain]) -> list[Sequence[int]]:
        """For each chain, which is not full, fewer tokens than it wants."""
        ...

    def release(self, request_ids: Sequence[str]) -> None: ...

    def close(self) -> None: ...


class Masks:
    """Implements :class:`Guesser` for a model with a mask token, which predicts what it stands for."""

    are_masks = True

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def guess(self, chains: Sequence[Chain]) -> list[Sequence[int]]:
        """One mask for each token but the first, which the chain's last token predicts."""
        return [(self._token_id,) * (chain.num_left - 1) for chain in chains]

    def release(self, request_ids: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass


class NgramGuesses:
    """Implements :class:`Guesser` with what followed a chain's last tokens when they came before.

    Args:
        max_num_tokens: most guesses of a forward.
    """

    are_masks = False

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self._told: dict[str, NgramProposer] = {}

    def guess(self, chains: Sequence[Chain]) -> list[Sequence[int]]:
        guesses: list[Sequence[int]] = []
        for chain in chains:
            count = min(chain.num_left - 1, self._max_num_tokens)
            told, drawn = chain.split()
            guesses.append(self._proposer(chain.request_id, told).continuation(drawn, count))
        return guesses

    def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._told.pop(request_id, None)

    def close(self) -> None:
        pass

    def _proposer(self, request_id: str, told: Sequence[int]) -> NgramProposer:
        """Knows the committed tokens, to which tokens are added until the request starts again."""
        known = self._told.get(request_id)
        if known is None or not known.is_prefix_of(told):
            known = self._told[request_id] = NgramProposer()
        known.extend(told[known.num_tokens :])
        return known


class InnerEngine(SyncDraftEngine, Protocol):
    """The engine of a smaller model in the draft's process."""

    def close(self) -> None: ...


class ModelGuesses:
    """Implements :class:`Guesser` with a smaller model, for proposals alone: outcomes would take its own.

    It draws with the noise that the draft draws with, so that both agree as often as they can.

    Args:
        engine: of the smaller model.
        max_num_tokens: most guesses of a forward, a step of the smaller model each.
    """

    are_masks = False

    def __init__(self, engine: InnerEngine, max_num_tokens: int) -> None:
        self._engine = engine
        self._max_num_tokens = max_num_tokens
        self._told: dict[str, list[int]] = {}

    def guess(self, chains: Sequence[Chain]) -> list[Sequence[int]]:
        guesses: list[Sequence[int]] = [()] * len(chains)
        asked = [
            index
            for index, chain in enumerate(chains)
            if not isinstance(chain, BranchChain) and chain.num_left > 1
        ]
        for index, guess in zip(asked, self._ask([chains[index] for index in asked]), strict=True):
            guesses[index] = guess
        return guesses

    def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._told.pop(request_id, None)
        self._engine.release(request_ids)

    def close(self) -> None:
        self._engine.close()

    def _ask(self, chains: Sequence[Chain]) -> Iterator[Sequence[int]]:
        if not chains:
            return
        replies = list(self._engine.speculate([self._item(chain) for chain in chains]).replies)
        lost = [index for index, reply in enumerate(replies) if isinstance(reply, UnknownSequence)]
        if lost:
            self.release([chains[index].request_id for index in lost])
            again = self._engine.speculate([self._item(chains[index]) for index in lost]).replies
            for index, reply in zip(lost, again, strict=True):
                replies[index] = reply
        for chain, reply in zip(chains, replies, strict=True):
            if isinstance(reply, Proposal):
                yield reply.draft.token_ids
            else:  # Without room for it, or with a longer context than it takes.
                self._told.pop(chain.request_id, None)
                yield ()

    def _item(self, chain: Chain) -> SpeculateItem:
        told = self._told.get(chain.request_id, [])
        base_len = common_prefix_len(told, chain.token_ids)
        self._told[chain.request_id] = list(chain.token_ids)
        return SpeculateItem(
            request_id=chain.request_id,
            round_id=0,
            base_len=base_len,
            token_ids=tuple(chain.token_ids[base_len:]),
            num_speculative_tokens=min(chain.num_left - 1, self._max_num_tokens),
            sampling=chain.state.sampling if base_len == 0 else None,
        )
