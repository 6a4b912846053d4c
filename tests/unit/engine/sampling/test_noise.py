"""The noise: the published generator, the same on every device, keyed by position, never by draft offset."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from specray.engine.sampling.noise import (
    NoiseKey,
    NoiseSource,
    PhiloxGenerator,
    Purpose,
    gumbel_from_words,
    philox_block,
    philox_words_at,
)
from tests.unit.engine.sampling.p_values import kolmogorov_smirnov_p_value

CPU = torch.device("cpu")
ONES = (1 << 64) - 1
KEYS = [
    NoiseKey(seed, position, purpose)
    for seed in (0, 7, 1 << 63, ONES)
    for position in (0, 1, 131_071)
    for purpose in Purpose
]


def signed(word: int) -> torch.Tensor:
    return torch.tensor(word - (1 << 64) if word >> 63 else word)


def philox_words(keys: Sequence[NoiseKey], count: int) -> torch.Tensor:
    """The words of :class:`PhiloxGenerator` by torch: int64 ``[len(keys), count]``."""
    rows = [(int(signed(key.seed)), key.position, key.purpose) for key in keys]
    return philox_words_at(torch.tensor(rows), torch.arange(count).expand(len(keys), count))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
        ),
        (
            (ONES, ONES, ONES, ONES),
            (ONES, ONES),
            (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
        ),
        (
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
        ),
    ],
)
def test_known_answers_of_philox4x64_10(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """The vectors that the authors publish with their reference implementation (Random123)."""
    words = philox_block([signed(word) for word in counter], [signed(word) for word in key])
    assert tuple(int(word) & ONES for word in words) == expected


def test_numpy_and_torch_forms_give_the_same_words() -> None:
    generator = PhiloxGenerator()
    for count in (1, 3, 4, 1001):
        expected = np.stack([generator.words(key, count) for key in KEYS])
        assert np.array_equal(philox_words(KEYS, count).numpy().view(np.uint64), expected)


@pytest.mark.parametrize("token_ids", [[0], [3], [0, 1, 2, 3, 4], [2, 5, 6, 7, 400, 999]])
def test_words_of_some_tokens_are_those_of_all(token_ids: list[int]) -> None:
    expected = philox_words(KEYS, 1000)[:, token_ids]
    keys = torch.tensor([(signed(key.seed), key.position, key.purpose) for key in KEYS])
    chosen = torch.tensor(token_ids).expand(len(KEYS), len(token_ids))
    assert torch.equal(philox_words_at(keys, chosen), expected)


def test_source_of_some_tokens_has_their_noise() -> None:
    token_ids = np.array([1, 2, 3, 17, 63])
    some = NoiseSource(64, token_ids=token_ids)
    rows = NoiseSource(64).gumbel(KEYS)
    torch.testing.assert_close(some.gumbel(KEYS), rows[:, token_ids], rtol=1e-14, atol=1e-14)
    assert some.uniform(KEYS[0]) == NoiseSource(64).uniform(KEYS[0])


def test_numpy_and_torch_forms_give_the_same_gumbel_noise() -> None:
    rows = NoiseSource(500).gumbel(KEYS)
    torch.testing.assert_close(rows, gumbel_from_words(philox_words(KEYS, 500)), rtol=1e-14, atol=1e-14)


def test_token_noise_does_not_depend_on_vocabulary_size() -> None:
    """Draft and target may pad their vocabularies differently."""
    small, large = NoiseSource(96), NoiseSource(1024)
    assert torch.equal(small.gumbel(KEYS), large.gumbel(KEYS)[:, :96])


def test_noise_depends_on_absolute_position_and_not_on_draft_offset() -> None:
    source = NoiseSource(64)
    from_ten = source.gumbel([NoiseKey(5, 10 + offset, Purpose.COUPLED_DRAW) for offset in range(4)])
    from_twelve = source.gumbel([NoiseKey(5, 12 + offset, Purpose.COUPLED_DRAW) for offset in range(4)])
    assert torch.equal(from_ten[2:], from_twelve[:2])
    assert not torch.equal(from_ten[0], from_twelve[0])


def test_every_part_of_the_key_matters() -> None:
    source = NoiseSource(64)
    keys = [
        NoiseKey(1, 2, Purpose.COUPLED_DRAW),
        NoiseKey(2, 2, Purpose.COUPLED_DRAW),
        NoiseKey(1, 3, Purpose.COUPLED_DRAW),
        *(NoiseKey(1, 2, purpose) for purpose in Purpose if purpose is not Purpose.COUPLED_DRAW),
    ]
    rows = source.gumbel(keys)
    assert len({tuple(row.tolist()) for row in rows}) == len(keys)
    assert len({source.uniform(key) for key in keys}) == len(keys)


def test_rows_kept_from_earlier_equal_fresh_rows() -> None:
    kept, fresh = NoiseSource(64), NoiseSource(64, max_cached_bytes=0)
    for keys in (KEYS[:5], KEYS[3:9], KEYS[::-1], [KEYS[0], KEYS[0]]):
        assert torch.equal(kept.gumbel(keys), fresh.gumbel(keys))


@pytest.mark.parametrize(("max_bytes", "num_rows"), [(0, 0), (3 * 64 * 8, 3), (2**26, 512)])
def test_rows_kept_stay_within_the_bytes_and_512_rows(max_bytes: int, num_rows: int) -> None:
    source = NoiseSource(64, max_cached_bytes=max_bytes)
    for position in range(600):
        source.gumbel([NoiseKey(0, position, Purpose.COUPLED_DRAW)])
    assert len(source._cached_rows) == num_rows


def test_smallest_and_largest_words_give_finite_noise() -> None:
    words = torch.tensor([0, -1])
    lowest, highest = gumbel_from_words(words).tolist()
    assert lowest == pytest.approx(-math.log(53 * math.log(2)), rel=1e-12)
    assert highest == pytest.approx(53 * math.log(2), rel=1e-12)


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    rows = NoiseSource(4096).gumbel([NoiseKey(3, position, Purpose.COUPLED_DRAW) for position in range(8)])
    p_value = kolmogorov_smirnov_p_value(rows.flatten().tolist(), lambda x: torch.exp(-torch.exp(-x)))
    assert p_value > 0.01


def test_uniforms_are_uniform_over_positions_and_seeds() -> None:
    source = NoiseSource(16)
    by_position = [source.uniform(NoiseKey(3, position, Purpose.ACCEPT_TEST)) for position in range(5000)]
    by_seed = [source.uniform(NoiseKey(seed, 3, Purpose.ACCEPT_TEST)) for seed in range(5000)]
    assert kolmogorov_smirnov_p_value(by_position, torch.clone) > 0.01
    assert kolmogorov_smirnov_p_value(by_seed, torch.clone) > 0.01


def test_neighbouring_positions_are_uncorrelated() -> None:
    rows = NoiseSource(20_000).gumbel([NoiseKey(3, position, Purpose.COUPLED_DRAW) for position in (5, 6)])
    assert abs(torch.corrcoef(rows)[0, 1].item()) < 0.03
