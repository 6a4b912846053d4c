"""N-gram proposer: proposals, and equality of the index with a scan of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specray.drafting import LONG_MATCH_LEN, NgramProposer, SuffixProposer


def proposed(
    tokens: Sequence[int], k: int, *, min_len: int = 2, max_len: int = 4, chunk: int = 100
) -> tuple[int, ...]:
    """Proposal after ``tokens``, which are given in chunks."""
    proposer = NgramProposer(min_len=min_len, max_len=max_len)
    for start in range(0, len(tokens), chunk):
        proposer.extend(tokens[start : start + chunk])
    assert proposer.num_tokens == len(tokens)
    draft = proposer.propose(k)
    assert draft.is_chain
    return draft.token_ids


def rescanned(tokens: Sequence[int], k: int, min_len: int, max_len: int) -> tuple[int, ...]:
    """Reference by scanning: the longest match, then the latest; a period is repeated."""
    for length in range(min(max_len, len(tokens) - 1), min_len - 1, -1):
        last = tuple(tokens[len(tokens) - length :])
        for end in range(len(tokens) - 1, length - 1, -1):
            if tuple(tokens[end - length : end]) == last:
                written = list(tokens)
                for offset in range(k):
                    written.append(written[end + offset])
                return tuple(written[len(tokens) :])
    return ()


@pytest.mark.parametrize(
    ("tokens", "k", "expected"),
    [
        ([], 4, ()),
        ([5], 4, ()),
        ([1, 2, 3, 4], 4, ()),
        ([1, 2, 3, 9, 1, 2], 3, (3, 9, 1)),
        ([1, 2, 3, 9, 1, 2], 1, (3,)),
        ([1, 2, 3, 9, 1, 2], 0, ()),
        # A single token is not a match.
        ([1, 2, 3, 9, 1], 3, ()),
        # Of two places the later one counts,
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, (8,)),
        # but a longer match counts more than a later one.
        ([6, 1, 2, 7, 5, 1, 2, 8, 6, 1, 2], 1, (7,)),
        # A match so near that nothing else follows: the period is repeated.
        ([4, 4, 4], 5, (4, 4, 4, 4, 4)),
        ([1, 2, 1, 2, 1], 5, (2, 1, 2, 1, 2)),
    ],
)
def test_proposal_is_what_followed_the_longest_latest_match(
    tokens: list[int], k: int, expected: tuple[int, ...]
) -> None:
    assert proposed(tokens, k) == expected
    assert proposed(tokens, k, chunk=1) == expected


def test_bounds_of_the_match_are_the_given_ones() -> None:
    tokens = [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]
    assert proposed(tokens, 1, min_len=1, max_len=2) == (8,)
    assert proposed(tokens, 1, min_len=1, max_len=3) == (7,)
    assert proposed([5, 6, 5], 2, min_len=1) == (6, 5)
    assert proposed([5, 6, 5], 2, min_len=2) == ()


@given(
    tokens=st.lists(st.integers(0, 2), max_size=40),
    k=st.integers(0, 8),
    min_len=st.integers(1, 3),
    more=st.integers(0, 3),
    chunk=st.integers(1, 7),
)
def test_index_finds_what_a_rescan_finds(
    tokens: list[int], k: int, min_len: int, more: int, chunk: int
) -> None:
    found = proposed(tokens, k, min_len=min_len, max_len=min_len + more, chunk=chunk)
    assert found == rescanned(tokens, k, min_len, min_len + more)


def test_proposing_changes_nothing() -> None:
    proposer = NgramProposer()
    proposer.extend([1, 2, 3, 1, 2])
    assert proposer.propose(2).token_ids == proposer.propose(2).token_ids == (3, 1)
    proposer.extend([3])
    assert proposer.propose(2).token_ids == (1, 2)


@pytest.mark.parametrize("proposer", [NgramProposer(), SuffixProposer()], ids=["ngram", "suffix"])
def test_match_is_as_long_as_what_was_written_twice(proposer: NgramProposer | SuffixProposer) -> None:
    proposer.extend([9, *range(10, 30)])
    lengths = [proposer.match_len]
    for token_id in range(10, 20):
        proposer.extend([token_id])
        lengths.append(min(proposer.match_len, LONG_MATCH_LEN))
    # One token is too short for a lookup, not for counts.
    assert lengths[2:] == [2, 3, 4, 5, 6, 7, 8, 8, 8]
    assert lengths[0] == 0
    proposer.extend([99])
    assert proposer.match_len == 0


def test_continuation_follows_tokens_that_are_not_kept() -> None:
    proposer = NgramProposer()
    proposer.extend([1, 2, 3, 4, 5, 1, 2])
    assert proposer.continuation([], 3) == proposer.propose(3).token_ids == (3, 4, 5)
    # The longest n-gram counts, whether or not it reaches back into what is kept.
    assert proposer.continuation([3], 3) == (4, 5, 1)
    assert proposer.continuation([9, 2, 3], 9) == (4, 5, 1, 2, 9, 2, 3, 4, 5)
    assert proposer.continuation([9], 3) == proposer.continuation([3, 9], 3) == ()
    assert proposer.continuation([3], 0) == ()
    # The last tokens that are kept come again: what followed them is new.
    assert proposer.continuation([7, 8, 1, 2], 4) == (7, 8, 1, 2)
    assert proposer.num_tokens == 7 and proposer.propose(3).token_ids == (3, 4, 5)


def test_prefix_is_known_by_its_last_token() -> None:
    proposer = NgramProposer()
    assert proposer.is_prefix_of([])
    proposer.extend([1, 2, 3])
    assert proposer.is_prefix_of([1, 2, 3]) and proposer.is_prefix_of([1, 2, 3, 4])
    assert not proposer.is_prefix_of([1, 2]) and not proposer.is_prefix_of([1, 2, 4, 4])
