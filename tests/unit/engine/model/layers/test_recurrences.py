"""Recurrences against the library's, however rows are cut, and bit for bit whatever is refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize
from transformers.models.qwen3_next import modeling_qwen3_next as library

from specray.engine.cache.state_pool import StatePool
from specray.engine.model.layers.recurrences import HeadRows, absorb, recur
from specray.engine.step import SequenceRows, StateShape

NUM_ROWS = 130
HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 8, 12


def make_rows(*, gate_dim: int = 1, has_rates: bool = True, num_rows: int = NUM_ROWS) -> HeadRows:
    """Rows of which some are forgotten at once, and some hardly."""
    torch.manual_seed(0)
    queries, keys = (normalize(torch.randn(num_rows, KEY_HEADS, KEY_DIM), dim=-1) for _ in range(2))
    decays = -torch.randn(num_rows, HEADS, gate_dim).exp()
    decays[5:9] *= 9
    decays[9:70] *= 0.01
    rates = torch.rand(num_rows, HEADS) if has_rates else None
    return HeadRows(queries, keys, torch.randn(num_rows, HEADS, VALUE_DIM), decays, rates)


def make_pool(*, gate_dim: int = 1) -> StatePool:
    """Whose memory holds NaN."""
    shape = StateShape(HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, gate_dim, 4, 4)
    pool = StatePool([shape], num_slots=3, max_open=8, dtype=torch.float32, device=torch.device("cpu"))
    pool.layers[0].fill(float("nan"))
    return pool


def step(pool: StatePool, heads: HeadRows, start: int, end: int, *, num_open: int = 0) -> torch.Tensor:
    """Outputs of a sequence's rows."""
    rows = SequenceRows(0, end - start, start, [0], (), 1, num_open)
    out = torch.full((end - start, HEADS, VALUE_DIM), float("nan"))
    with pool.step([rows]):
        recur(heads[start:end], pool.layers[0], pool.rows[0], out)
    return out


def expected_of(heads: HeadRows) -> tuple[torch.Tensor, torch.Tensor]:
    """What the library computes of all rows at once, and the state behind them."""
    batch = (each[None] for each in (heads.queries * KEY_DIM**0.5, heads.keys, heads.values))
    assert heads.rates is not None
    output, state = library.torch_chunk_gated_delta_rule(
        *batch, g=heads.log_decays[None, :, :, 0], beta=heads.rates[None], output_final_state=True
    )
    return output[0], state[0]


def test_rows_cut_anywhere_are_those_of_the_library() -> None:
    heads = make_rows()
    output, state = expected_of(heads)
    for cut in range(1, NUM_ROWS + 1):
        pool = make_pool()
        found = [step(pool, heads, 0, cut)]
        if cut < NUM_ROWS:
            found.append(step(pool, heads, cut, NUM_ROWS))
        torch.testing.assert_close(torch.cat(found), output, rtol=1e-5, atol=5e-5)
        torch.testing.assert_close(pool.layers[0].states[1], state, rtol=1e-5, atol=5e-5)


def test_rows_one_by_one_are_those_of_the_library() -> None:
    heads = make_rows()
    pool = make_pool()
    found = [step(pool, heads, row, row + 1, num_open=1) for row in range(NUM_ROWS)]
    torch.testing.assert_close(torch.cat(found), expected_of(heads)[0], rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize(("gate_dim", "has_rates"), [(KEY_DIM, True), (1, False)], ids=["kimi", "mamba"])
def test_chunks_of_other_kinds_are_the_rows_one_by_one(gate_dim: int, has_rates: bool) -> None:
    heads = make_rows(gate_dim=gate_dim, has_rates=has_rates)
    single, chunks = make_pool(gate_dim=gate_dim), make_pool(gate_dim=gate_dim)
    output = torch.cat([step(single, heads, row, row + 1, num_open=1) for row in range(NUM_ROWS)])
    for cut in (1, 3, 63, 64, 65, 127, 129):
        found = [step(chunks, heads, 0, cut), step(chunks, heads, cut, NUM_ROWS)]
        torch.testing.assert_close(torch.cat(found), output, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("end", [65, 128, 130])
def test_a_cut_at_a_multiple_of_the_unit_keeps_every_bit(end: int) -> None:
    heads = make_rows()
    whole, cut = make_pool(), make_pool()
    expected = step(whole, heads, 0, end, num_open=1)
    found = torch.cat([step(cut, heads, 0, 64), step(cut, heads, 64, end, num_open=1)])
    assert torch.equal(found, expected)
    assert torch.equal(cut.layers[0].states[1], whole.layers[0].states[1])


@pytest.mark.parametrize(("gate_dim", "has_rates"), [(1, True), (KEY_DIM, True), (1, False)])
@pytest.mark.parametrize("num_open", range(1, 9))
def test_whatever_of_the_open_rows_is_refused_others_have_plain_decodings_bits(
    num_open: int, gate_dim: int, has_rates: bool
) -> None:
    """Of each step the first rows stay, the others are of other tokens; then plain decoding goes on."""
    heads = make_rows(gate_dim=gate_dim, has_rates=has_rates, num_rows=60)
    wrong = make_rows(gate_dim=gate_dim, has_rates=has_rates, num_rows=60)
    wrong.values.add_(1.0)
    plain = make_pool(gate_dim=gate_dim)
    expected = [step(plain, heads, 0, 3, num_open=1)]
    expected += [step(plain, heads, row, row + 1, num_open=1) for row in range(3, 60)]
    output = torch.cat(expected)
    for num_kept in range(num_open + 1):
        pool, at = make_pool(gate_dim=gate_dim), 3
        step(pool, heads, 0, 3, num_open=1)
        for _ in range(3):
            mixed = HeadRows(
                *(
                    None
                    if right is None or other is None
                    else torch.cat((right[: at + num_kept], other[at + num_kept :]))
                    for right, other in zip(
                        (heads.queries, heads.keys, heads.values, heads.log_decays, heads.rates),
                        (wrong.queries, wrong.keys, wrong.values, wrong.log_decays, wrong.rates),
                        strict=True,
                    )
                )  # type: ignore[arg-type]
            )
            found = step(pool, mixed, at, at + num_open, num_open=num_open)
            assert torch.equal(found[:num_kept], output[at : at + num_kept])
            at += num_kept
        for row in range(at, at + 3):
            assert torch.equal(step(pool, heads, row, row + 1, num_open=1), output[row : row + 1])


@pytest.mark.parametrize(("gate_dim", "has_rates"), [(1, True), (KEY_DIM, True), (1, False)])
def test_rows_over_records_that_stay_have_plain_decodings_bits(gate_dim: int, has_rates: bool) -> None:
    """As a draft's: one by one while the state stays; then the next round takes some of them back."""
    heads = make_rows(gate_dim=gate_dim, has_rates=has_rates, num_rows=60)
    wrong = HeadRows(heads.queries, heads.keys, heads.values + 1.0, heads.log_decays, heads.rates)
    plain = make_pool(gate_dim=gate_dim)
    expected = [step(plain, heads, 0, 3, num_open=1)]
    expected += [step(plain, heads, row, row + 1, num_open=1) for row in range(3, 60)]
    output = torch.cat(expected)
    for num_kept in range(7):
        pool = make_pool(gate_dim=gate_dim)
        step(pool, heads, 0, 3, num_open=1)
        for start in range(3, 8 * num_kept, max(1, num_kept)):
            for row in range(start, start + 7):
                is_kept = row < start + num_kept
                found = step(pool, heads if is_kept else wrong, row, row + 1, num_open=row + 2 - start)
                assert pool.bases[1] == start - 1
                assert not is_kept or torch.equal(found, output[row : row + 1])


def test_a_first_chunk_in_the_middle_of_a_unit_is_made_up_behind_its_rows() -> None:
    heads, state = make_rows(), torch.randn(HEADS, KEY_DIM, VALUE_DIM)
    whole, output = absorb(heads[60:70], state, 60)
    middle, first = absorb(heads[60:64], state, 60)
    last, second = absorb(heads[64:70], middle, 64)
    assert torch.equal(torch.cat((first, second)), output) and torch.equal(last, whole)
