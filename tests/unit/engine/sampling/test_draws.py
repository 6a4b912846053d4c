"""Draws are the best of logits and noise, whichever tokens' noise is left out on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from specray.engine.sampling import draws as draws_module
from specray.engine.sampling.draws import SCORE_SPREAD, best_tokens, draw_tokens
from specray.engine.sampling.noise import NoiseKey, NoiseSource, Purpose
from tests.pairwise import pairs

CPU = torch.device("cpu")


@pytest.fixture(params=["kernel", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "torch":
        monkeypatch.setattr(draws_module, "compiled_kernels", lambda: None)
    else:
        pytest.importorskip("numba")
    yield str(request.param)


def random_logits(num_rows: int, vocab_size: int, spread: float) -> torch.Tensor:
    return spread * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))


def keys_of(num_rows: int, seed: int = 0) -> list[NoiseKey]:
    return [NoiseKey(seed + 17 * row, 5 + row, Purpose.COUPLED_DRAW) for row in range(num_rows)]


def scores_of(logits: torch.Tensor, keys: list[NoiseKey]) -> torch.Tensor:
    return logits + NoiseSource(logits.shape[1]).gumbel(keys)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 100, 4096, 5001])
def test_token_is_the_best_of_all_scores(vocab_size: int) -> None:
    """From rows where noise alone decides to rows where it decides nothing."""
    for spread in (0.0, 0.1, 1.0, 3.0, 10.0, 1e3, 1e6):
        logits, keys = random_logits(50, vocab_size, spread), keys_of(50)
        drawn = [draw.token_id for draw in draw_tokens(logits, keys, NoiseSource(vocab_size))]
        assert drawn == scores_of(logits, keys).argmax(-1).tolist(), spread


@pytest.mark.parametrize(
    "key",
    [
        NoiseKey((1 << 64) - 1, 131_071, Purpose.RESIDUAL_DRAW),
        NoiseKey(1 << 63, 0, Purpose.COUPLED_DRAW),
        NoiseKey(0, (1 << 31) + 1, Purpose.DRAFT_DRAW),
    ],
)
def test_keys_of_any_size(key: NoiseKey) -> None:
    logits = torch.zeros(1, 999)
    [draw] = draw_tokens(logits, [key], NoiseSource(999))
    assert draw.token_id == int(scores_of(logits, [key]).argmax())


@pairs(vocab_size=(5, 64, 5001), share=(0.1, 0.9, 1.0), spread=(0.0, 1.0, 10.0))
def test_noise_of_some_tokens_is_that_of_their_ids(vocab_size: int, share: float, spread: float) -> None:
    order = np.random.default_rng(vocab_size).permutation(vocab_size)
    token_ids = np.sort(order[: max(1, int(share * vocab_size))])
    logits, keys = random_logits(30, len(token_ids), spread), keys_of(30)
    expected = (logits + NoiseSource(vocab_size).gumbel(keys)[:, token_ids]).argmax(-1)
    drawn = draw_tokens(logits, keys, NoiseSource(vocab_size, token_ids=token_ids), is_judged=True)
    assert [draw.token_id for draw in drawn] == expected.tolist()
    assert all(math.isfinite(draw.lead) for draw in drawn)


def test_what_is_cut_off_is_never_drawn() -> None:
    logits = torch.full((200, 100), -math.inf)
    logits[:, 37] = -20.0
    logits[:, 99] = -20.5
    keys = keys_of(200)
    drawn = [draw.token_id for draw in draw_tokens(logits, keys, NoiseSource(100))]
    assert drawn == scores_of(logits, keys).argmax(-1).tolist()
    assert set(drawn) == {37, 99}


def test_rows_without_noise_among_others() -> None:
    logits, keys = random_logits(9, 300, 1.0), keys_of(9)
    some = [key if row % 3 else None for row, key in enumerate(keys)]
    expected = scores_of(logits, keys)
    expected[::3] = logits[::3].double()
    drawn = draw_tokens(logits, some, NoiseSource(300), is_judged=True)
    assert [draw.token_id for draw in drawn] == expected.argmax(-1).tolist()
    plain = draw_tokens(logits, [None] * 9, NoiseSource(300), is_judged=True)
    assert drawn[::3] == plain[::3]


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("vocab_size", [1, 17, 4096])
def test_lead_is_the_share_of_the_best_score(vocab_size: int, spread: float) -> None:
    logits, keys = random_logits(100, vocab_size, spread), keys_of(100, seed=3)
    expected = (scores_of(logits, keys) / SCORE_SPREAD).log_softmax(-1).amax(-1)
    drawn = draw_tokens(logits, keys, NoiseSource(vocab_size), is_judged=True)
    torch.testing.assert_close(
        torch.tensor([draw.lead for draw in drawn]).double(), expected, atol=0.12, rtol=0.0
    )


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 4096, 5001])
def test_lead_without_noise_is_exact(vocab_size: int) -> None:
    for spread in (0.0, 1.0, 5.0, 100.0, 1e6):
        logits = random_logits(20, vocab_size, spread)
        # Impossible tokens, at the beginning and at the end.
        logits[7, : vocab_size // 2] = -math.inf
        logits[8, (vocab_size + 1) // 2 :] = -math.inf
        drawn = draw_tokens(logits, [None] * 20, NoiseSource(vocab_size), is_judged=True)
        assert [draw.token_id for draw in drawn] == logits.argmax(-1).tolist(), spread
        leads = torch.tensor([draw.lead for draw in drawn])
        expected = (logits.double() / SCORE_SPREAD).log_softmax(-1).amax(-1)
        torch.testing.assert_close(leads.double(), expected, atol=2e-4, rtol=0.0)


def test_lead_is_not_computed_unasked() -> None:
    for keys in (keys_of(3), [None] * 3):
        assert [draw.lead for draw in draw_tokens(torch.randn(3, 64), keys, NoiseSource(64))] == [0.0] * 3


def test_logits_stay_as_they_are() -> None:
    logits = random_logits(4, 50, 1.0)
    before = logits.clone()
    draw_tokens(logits, [*keys_of(3), None], NoiseSource(50), is_judged=True)
    assert torch.equal(logits, before)


def test_doubles_are_drawn_from_as_well() -> None:
    logits, keys = random_logits(5, 80, 1.0).double(), keys_of(5)
    drawn = [draw.token_id for draw in draw_tokens(logits, keys, NoiseSource(80))]
    assert drawn == scores_of(logits, keys).argmax(-1).tolist()


def test_first_of_equal_tokens_is_the_best() -> None:
    assert best_tokens(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])) == [1, 0]
