"""Noise from a counter-based generator, keyed by (request seed, absolute position, token id) and a purpose.

The generator is Philox4x64-10 (Salmon, Moraes, Dror, Shaw: *Parallel random numbers: as easy as 1, 2, 3*,
SC 2011). Nothing is drawn in an order and nothing is kept between draws, so the draft, the target, a replay
after a failover and any number of draft tokens see the same number for the same token at the same position.

Layout of one block of four 64-bit words: key = (seed, a constant), counter =
(1 + token_id // 4, position, purpose, 0), word = token_id % 4. The 1 is there because numpy's generator
increments its counter before each block, and its C loop is the fast path on CPU; the torch form of the same
function serves other devices, where logits should not leave.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
KEY_TAG = int.from_bytes(b"specray\0", "little")
"""Second word of every key."""
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
NUM_ROUNDS = 10
_DEFAULT_CACHE_BYTES = 64 * 1024 * 1024
_MAX_CACHED_ROWS = 512
"""Rows kept, at most: those of 64 sequences with eight positions each. Of 4,096 tokens 64 MiB are 2,048 rows,
which a draft filled in four minutes of load: it seemed to leak."""


class Purpose(enum.IntEnum):
    """What a number is for; numbers of different purposes are independent."""

    COUPLED_DRAW = 0
    """Gumbel noise of the committed token, shared by draft and target."""
    ACCEPT_TEST = 1
    """Uniform number of rejection sampling's acceptance."""
    RESIDUAL_DRAW = 2
    """Gumbel noise of the recovered or bonus token under rejection sampling."""
    DRAFT_DRAW = 3
    """Gumbel noise of the draft's own token under rejection sampling."""


class NoiseKey(NamedTuple):
    """Names one row of noise: one number for each token id."""

    seed: int
    position: int
    """Absolute position of the token produced; the first prompt token has position 0."""
    purpose: Purpose


def philox_key(key: NoiseKey) -> tuple[int, int, int, int]:
    """The unsigned words that a row's blocks share: the two of the key, position and purpose."""
    return key.seed & _MASK64, KEY_TAG, key.position, key.purpose


class PhiloxGenerator:
    """Philox words through numpy's C implementation; one reused generator, set to a key before each use.

    Setting the state costs 2 microseconds, building a generator 20.
    """

    def __init__(self) -> None:
        self._generator = np.random.Philox(key=np.zeros(2, np.uint64))
        self._state: Any = dict(self._generator.state)
        self._state["state"] = {"counter": np.zeros(4, np.uint64), "key": np.zeros(2, np.uint64)}

    def words(self, key: NoiseKey, count: int) -> npt.NDArray[np.uint64]:
        """The first ``count`` words of ``key``: word i belongs to token id i."""
        state = self._state["state"]
        seed, tag, position, purpose = philox_key(key)
        state["counter"][:] = (0, position, purpose, 0)
        state["key"][:] = (seed, tag)
        # numpy's setter copies; buffer_pos 4 means that no word of an earlier block is left.
        self._state["buffer_pos"] = 4
        self._generator.state = self._state
        return np.asarray(self._generator.random_raw(count))


def philox_words_at(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The words of some tokens.

    Args:
        keys: int64 ``[num_rows, 3]``: seed, position and purpose.
        token_ids: int64 ``[num_rows, any]``.

    Returns:
        int64, of the shape of ``token_ids``.
    """
    seeds, positions, purposes = (column[:, None] for column in keys.unbind(1))
    block = (token_ids >> 2) + 1
    counter = [
        block,
        positions.expand_as(block),
        purposes.expand_as(block),
        torch.zeros_like(block),
    ]
    words = torch.stack(philox_block(counter, [seeds, torch.full_like(seeds, KEY_TAG)]), dim=-1)
    return words.gather(-1, (token_ids & 3)[..., None])[..., 0]


def philox_block(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Philox4x64-10 of int64 tensors with the bits of unsigned words: four of one shape, keyed by two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(NUM_ROUNDS):
        if round_index:
            k0, k1 = k0 + signed(WEYL[0]), k1 + signed(WEYL[1])
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return [c0, c1, c2, c3]


def _multiply(words: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 64 bits of the unsigned 128-bit product, from 32-bit pieces (int64 wraps like uint64)."""
    high_factor, low_factor = multiplier >> 32, multiplier & _MASK32
    high, low = _upper(words), words & _MASK32
    middle = high * low_factor + _upper(low * low_factor)
    carry = low * high_factor + (middle & _MASK32)
    return high * high_factor + _upper(middle) + _upper(carry), words * signed(multiplier)


def _upper(words: Tensor) -> Tensor:
    """Logical shift right by 32: the mask removes the copies of the sign bit."""
    return (words >> 32) & _MASK32


def signed(value: int) -> int:
    """The int64 with the bits of ``value`` modulo 2^64."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _uniform_numpy(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Uniforms in (0, 1), exact in float64 and never 0 or 1, so that both logarithms below are finite.

    52 bits and a half: with 53 the sum would round, and to 1.0 at the top.
    """
    uniforms = (words >> np.uint64(12)).astype(np.float64)
    uniforms += 0.5
    uniforms *= 2.0**-52
    return uniforms


def _gumbel_numpy(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    values = _uniform_numpy(words)
    np.log(values, out=values)
    np.negative(values, out=values)
    np.log(values, out=values)
    return np.negative(values, out=values)


def uniform_from_words(words: Tensor) -> Tensor:
    """Uniforms in (0, 1), float64, from int64 words of any shape; the bits are those of the numpy form."""
    return ((words >> 12) & ((1 << 52) - 1)).to(torch.float64).add_(0.5).mul_(2.0**-52)


def gumbel_from_words(words: Tensor) -> Tensor:
    """Standard Gumbel numbers, float64, from int64 words of any shape: ``-log(-log(u))``.

    The largest is 36.7: the tail is cut where its probability is 2^-53.
    """
    return uniform_from_words(words).log_().neg_().log_().neg_()


class NoiseSource:
    """Rows of noise for one vocabulary, or for some of its token ids, on the CPU.

    Keeps the rows used last: the draft ranks outcomes at positions where it has just drawn, and the target
    sees a rejected position again. A row is a function of its key, so keeping it cannot change a result.

    Args:
        max_cached_bytes: for the rows kept, of which there are at most ``_MAX_CACHED_ROWS``.
        token_ids: ids whose numbers a row holds, in ascending order; None: all.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        max_cached_bytes: int = _DEFAULT_CACHE_BYTES,
        token_ids: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self.token_ids = token_ids
        """Token ids of a row's numbers; None: all."""
        self._generator = PhiloxGenerator()
        self.row_size = vocab_size if token_ids is None else len(token_ids)
        """Numbers of a row."""
        self._max_cached_rows = min(_MAX_CACHED_ROWS, max_cached_bytes // (8 * self.row_size))
        self._cached_rows: OrderedDict[NoiseKey, Tensor] = OrderedDict()

    def gumbel(self, keys: Sequence[NoiseKey]) -> Tensor:
        """Gumbel noise, float64 ``[len(keys), row_size]``."""
        rows = {key: self._cached_rows[key] for key in keys if key in self._cached_rows}
        for key in keys:
            if key not in rows:
                rows[key] = torch.from_numpy(_gumbel_numpy(self._words(key)))
        self._remember(rows)
        return rows[keys[0]][None] if len(keys) == 1 else torch.stack([rows[key] for key in keys])

    def uniform(self, key: NoiseKey) -> float:
        """One uniform in (0, 1): that of token id 0."""
        return float(_uniform_numpy(self._generator.words(key, 1))[0])

    def _words(self, key: NoiseKey) -> npt.NDArray[np.uint64]:
        words = self._generator.words(key, self._vocab_size)
        return words if self.token_ids is None else words[self.token_ids]

    def _remember(self, rows: dict[NoiseKey, Tensor]) -> None:
        if len(rows) > self._max_cached_rows:
            return
        for key, row in rows.items():
            self._cached_rows[key] = row
            self._cached_rows.move_to_end(key)
        while len(self._cached_rows) > self._max_cached_rows:
            self._cached_rows.popitem(last=False)
