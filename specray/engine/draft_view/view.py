"""One request as a draft reads it: the target's tokens, what it makes of them, and which of those it sees.

The draft's sequence is an honest one: a row of its own tokens from position 0 on, of which nothing is cut out
afterwards. So its cache, its prefix cache and its positions are what they are for any other sequence. When
the window moves on, the sequence becomes another one, which shares the first tokens with the one before::

    the target's tokens   | a | b | c | d | e | f | g |      as the router tells them
    the draft's           | 0 | 1   2   3 | 4 | 5   6 | 7 | 8 |     each token's pieces, one after another
    its view              [sinks]             [start .......... ]    positions 0, 1, 2, ... of the view
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Protocol

from specray.engine.sampling.state import SamplingState
from specray.engine.window import NUM_SINKS, Window
from specray.types import SamplingParams


class Vocabulary(Protocol):
    """How a draft reads another vocabulary."""

    @property
    def begin(self) -> tuple[int, ...]:
        """The draft's tokens with which each of its texts begins."""
        ...

    def read(self, token_id: int) -> tuple[int, ...]:
        """The draft's tokens for one of the target's."""
        ...

    def write(self, draft_ids: Sequence[int], behind: Sequence[int]) -> tuple[int, ...]:
        """The target's tokens for a text of the draft's; ``behind``: the target's last tokens before it."""
        ...


class Reading:
    """Implements ``ToldTokens`` for what one draft reads.

    Args:
        vocabulary: of the draft; None: it is the target's.
        window: None: the draft sees all.
        sampling: parameters of the request, in the target's vocabulary.
    """

    def __init__(
        self, vocabulary: Vocabulary | None, window: Window | None, sampling: SamplingParams
    ) -> None:
        self._vocabulary = vocabulary
        self._window = window
        self.state = SamplingState(sampling)
        """Sampling state of what the router has told."""
        self.token_ids: list[int] = []
        """The target's tokens that the router has told."""
        self._pieces: list[tuple[int, ...]] = []
        self._length = 0
        """The draft's tokens for all of them."""
        self._num_held = 0
        """Those of them, from the first on, that the engine was told as they are."""
        self._held_start = 0
        """Where the view started in which it was told them."""

    @property
    def sampling(self) -> SamplingParams:
        """Parameters of the request."""
        return self.state.sampling

    @property
    def output_ids(self) -> list[int]:
        """The output so far, in the target's tokens."""
        return self.token_ids[self.sampling.num_prompt_tokens :]

    @property
    def start(self) -> int:
        """Where the view's last part starts."""
        return 0 if self._window is None else self._window.start(self._length)

    def own_id(self, token_id: int) -> int:
        """The draft's token for one that is a single token to it, too."""
        if self._vocabulary is None:
            return token_id
        own = self._vocabulary.read(token_id)
        assert len(own) == 1, (token_id, own)
        return own[0]

    def own_ids(self, token_ids: Sequence[int]) -> list[int]:
        """The draft's tokens for the first of some that are single tokens to it, too."""
        if self._vocabulary is None:
            return list(token_ids)
        own: list[int] = []
        for token_id in token_ids:
            pieces = self._vocabulary.read(token_id)
            if len(pieces) != 1:
                break
            own += pieces
        return own

    def tell(self, base_len: int, token_ids: Sequence[int], sampling: SamplingParams | None) -> None:
        """Keeps the first ``base_len`` of the target's tokens and appends.

        Args:
            sampling: parameters of the request, where they are told anew.
        """
        assert base_len <= len(self.token_ids), (base_len, len(self.token_ids))
        self._length -= sum(map(len, self._pieces[base_len:]))
        self._num_held = min(self._num_held, self._length)
        del self.token_ids[base_len:], self._pieces[base_len:]
        if sampling is not None and sampling != self.sampling:
            self.state = SamplingState(sampling, self.token_ids)
        self.state.truncate(base_len)
        self.state.advance(token_ids)
        self.token_ids += token_ids
        read = _as_it_is if self._vocabulary is None else self._vocabulary.read
        new = [read(token_id) for token_id in token_ids]
        if new and not base_len:
            new[0] = self._begun(new[0])
        self._pieces += new
        self._length += sum(map(len, new))

    def _begun(self, first: tuple[int, ...]) -> tuple[int, ...]:
        """The pieces of the first token, behind what the draft begins a text with and the target may not."""
        begin = () if self._vocabulary is None else self._vocabulary.begin
        return first if first[: len(begin)] == begin else (*begin, *first)

    @property
    def num_seen(self) -> int:
        """Tokens of the view."""
        start = self.start
        return self._length - start + (NUM_SINKS if start else 0)

    def view(self) -> tuple[int, list[int]]:
        """What the engine is told: how many of the tokens that it has it keeps, and those behind them."""
        start = self.start
        kept = self._num_held if start == self._held_start else min(self._num_held, NUM_SINKS)
        if not start:
            return kept, self._behind(kept)
        if start != self._held_start or kept <= NUM_SINKS:
            kept = min(kept, NUM_SINKS)
            return kept, [*self._own(NUM_SINKS)[kept:], *self._behind(start)]
        # Of the tokens before the view's last part, it has the sinks alone.
        kept = max(kept, start)
        return kept - start + NUM_SINKS, self._behind(kept)

    def hold(self) -> None:
        """Notes that the engine was told the view."""
        self._num_held, self._held_start = self._length, self.start

    def _own(self, count: int) -> list[int]:
        """The draft's first tokens."""
        # Of some of the target's tokens the draft has nothing.
        return list(islice(chain.from_iterable(self._pieces), count))

    def _behind(self, place: int) -> list[int]:
        """The draft's tokens from a place on."""
        left, index = self._length - place, len(self._pieces)
        while left > 0:
            index -= 1
            left -= len(self._pieces[index])
        return list(chain.from_iterable(self._pieces[index:]))[-left:]


def _as_it_is(token_id: int) -> tuple[int, ...]:
    return (token_id,)
