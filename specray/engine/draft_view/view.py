"""One request as a draft sees it: the target's tokens, the draft's own for them, and which of those it sees.

The draft's sequence is an honest one: a row of its own tokens from position 0 on, of which nothing is cut out
afterwards. So its cache, its prefix cache and its positions are what they are for any other sequence. When
the window moves on, the sequence becomes another one, which shares the first tokens with the one before::

    the target's tokens   | a | b | c | d | e | f | g |      as the router sends them
    the draft's           | 0 | 1   2   3 | 4 | 5   6 | 7 | 8 |     each token's pieces, one after another
    its view              [sinks]             [start .......... ]    positions 0, 1, 2, ... of the view
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Protocol

from specray.engine.sampling.state import SamplingState
from specray.engine.window import NUM_SINKS, DraftWindow
from specray.types import SamplingParams


class Vocabulary(Protocol):
    """Translates another vocabulary's tokens."""

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


class DraftView:
    """Implements ``CommittedTokens`` for one draft and request.

    Args:
        vocabulary: of the draft; None: it is the target's.
        window: None: the draft sees all.
        sampling: parameters of the request, in the target's vocabulary.
    """

    def __init__(
        self, vocabulary: Vocabulary | None, window: DraftWindow | None, sampling: SamplingParams
    ) -> None:
        self._vocabulary = vocabulary
        self._window = window
        self.state = SamplingState(sampling)
        """Sampling state of the tokens that the router has sent."""
        self.token_ids: list[int] = []
        """The target's tokens that the router has sent."""
        self._pieces: list[tuple[int, ...]] = []
        self._length = 0
        """Number of the draft's tokens for all of them."""
        self._num_held = 0
        """Length of their prefix that the engine holds."""
        self._held_start = 0
        """Start of the view that the engine holds."""

    @property
    def sampling(self) -> SamplingParams:
        return self.state.sampling

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.sampling.num_prompt_tokens :]

    @property
    def start(self) -> int:
        """Start of the view's last part."""
        return 0 if self._window is None else self._window.start(self._length)

    def own_id(self, token_id: int) -> int:
        """The draft's token for one that is a single token in its vocabulary."""
        if self._vocabulary is None:
            return token_id
        own = self._vocabulary.read(token_id)
        assert len(own) == 1, (token_id, own)
        return own[0]

    def own_ids(self, token_ids: Sequence[int]) -> list[int]:
        """The draft's tokens for the longest prefix of single tokens in its vocabulary."""
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
        """Keeps the first ``base_len`` of the target's tokens and appends; ``sampling`` None: unchanged."""
        assert base_len <= len(self.token_ids), (base_len, len(self.token_ids))
        self._length -= sum(map(len, self._pieces[base_len:]))
        self._num_held = min(self._num_held, self._length)
        del self.token_ids[base_len:], self._pieces[base_len:]
        if sampling is not None and sampling != self.sampling:
            self.state = SamplingState(sampling, self.token_ids)
        self.state.truncate(base_len)
        self.state.advance(token_ids)
        self.token_ids += token_ids
        read = self._vocabulary.read if self._vocabulary is not None else lambda token_id: (token_id,)
        new: list[tuple[int, ...]] = [read(token_id) for token_id in token_ids]
        if new and not base_len:
            new[0] = self._begun(new[0])
        self._pieces += new
        self._length += sum(map(len, new))

    def _begun(self, first: tuple[int, ...]) -> tuple[int, ...]:
        """The first token's pieces after the draft's begin tokens, which the target may lack."""
        begin = () if self._vocabulary is None else self._vocabulary.begin
        return first if first[: len(begin)] == begin else (*begin, *first)

    @property
    def num_seen(self) -> int:
        start = self.start
        return self._length - start + (NUM_SINKS if start else 0)

    def update(self) -> tuple[int, list[int]]:
        """Number of tokens that the engine keeps, and tokens to append to them."""
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
        """Marks the view as what the engine holds."""
        self._num_held, self._held_start = self._length, self.start

    def _own(self, count: int) -> list[int]:
        # Some of the target's tokens have no pieces.
        return list(islice(chain.from_iterable(self._pieces), count))

    def _behind(self, place: int) -> list[int]:
        left, index = self._length - place, len(self._pieces)
        while left > 0:
            index -= 1
            left -= len(self._pieces[index])
        return list(chain.from_iterable(self._pieces[index:]))[-left:]
