"""Suffix decoding: counts and proposals against a brute force over all strings, and past outputs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specray.drafting import OutputStore, OutputStores, SuffixIndex, SuffixProposer

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=3)
TOKENS = st.lists(st.integers(0, 2), max_size=30)


def indexed(texts: Sequence[Sequence[int]], max_depth: int = 56) -> SuffixIndex:
    index = SuffixIndex(max_depth=max_depth)
    for text in texts:
        index.begin_text()
        for token in text:
            index.append(token)
    return index


def places(texts: Sequence[Sequence[int]], string: Sequence[int]) -> list[int]:
    """End positions of ``string``, in tokens over all texts."""
    ends, before = [], 0
    for text in texts:
        for end in range(len(string), len(text) + 1):
            if list(text[end - len(string) : end]) == list(string):
                ends.append(before + end)
        before += len(text)
    return ends


def strings(texts: Sequence[Sequence[int]], longest: int) -> set[tuple[int, ...]]:
    return {
        tuple(text[start : start + length])
        for text in texts
        for length in range(1, longest + 1)
        for start in range(len(text) - length + 1)
    }


@given(texts=TEXTS, max_depth=st.integers(1, 6))
def test_counts_and_latest_places_are_those_of_a_scan(texts: list[list[int]], max_depth: int) -> None:
    index = indexed(texts, max_depth)
    for string in strings(texts, max_depth):
        match = index.find(string)
        assert match is not None
        assert match.length == len(string)
        ends = places(texts, string)
        assert index.count(match.state) == len(ends), string
        assert index.latest(match.state) == ends[-1], string


@given(texts=TEXTS, end=TOKENS)
def test_find_gives_the_longest_end_that_occurs(texts: list[list[int]], end: list[int]) -> None:
    match = indexed(texts, 8).find(end)
    lengths = [length for length in range(1, min(8, len(end)) + 1) if places(texts, end[len(end) - length :])]
    assert (match.length if match else 0) == max(lengths, default=0)


@given(text=TOKENS)
def test_tail_match_is_the_longest_end_that_came_before(text: list[int]) -> None:
    match = indexed([text], 8).tail_match()
    lengths = [
        length
        for length in range(1, min(8, len(text)) + 1)
        if len(places([text], text[len(text) - length :])) > 1
    ]
    assert (match.length if match else 0) == max(lengths, default=0)


def test_index_stays_small() -> None:
    index = indexed([[index * index % 97 for index in range(500)], [3] * 500])
    assert len(index._next) <= 2 * 1000


# Proposals


def brute_force(
    text: Sequence[int], past: Sequence[Sequence[int]], k: int, *, min_prob: float, spec_factor: float
) -> float:
    """The best score over all matches and all texts, by scanning for every string."""
    best = 0.0
    for texts, needed in (([text], 2), (past, 1)):
        for length in range(1, min(24, len(text)) + 1):
            string = list(text[len(text) - length :])
            if len(places(texts, string)) < needed:
                break
            best = max(best, _path_score(texts, string, min(k, int(spec_factor * length)), min_prob))
    return best


def _path_score(texts: Sequence[Sequence[int]], string: list[int], longest: int, min_prob: float) -> float:
    prob, score = 1.0, 0.0
    for _ in range(longest):
        counted = [(places(texts, [*string, token]), token) for token in range(3)]
        ends, token = max(counted, key=lambda each: (len(each[0]), each[0][-1:] or [0]))
        prob *= len(ends) / len(places(texts, string))
        if not ends or prob < min_prob:
            break
        string, score = [*string, token], score + prob
    return score


@pytest.mark.slow
@example(text=[0] * 20, past=[], k=3, spec_factor=1.0)
@example(text=[0, 0, 1, 0, 2, 0], past=[[0, 0, 0, 2, 0], [0, 2, 1, 0, 2]], k=2, spec_factor=2.0)
@example(text=[2, 1], past=[[1, 1, 1, 2, 1, 2, 1, 0]], k=2, spec_factor=2.0)
@given(
    text=TOKENS,
    past=st.lists(TOKENS, max_size=2),
    k=st.integers(0, 6),
    spec_factor=st.sampled_from([1.0, 2.0]),
)
def test_proposal_scores_what_a_brute_force_scores(
    text: list[int], past: list[list[int]], k: int, spec_factor: float
) -> None:
    store = OutputStore(1000)
    for output in past:
        store.add(output)
    proposer = SuffixProposer(store=store, min_prob=0.2, spec_factor=spec_factor)
    proposer.extend(text)
    proposal = proposer.propose(k).token_ids
    expected = brute_force(text, past, k, min_prob=0.2, spec_factor=spec_factor)
    assert len(proposal) <= k
    if not proposal:
        assert expected == 0.0
        return
    # Drawn from one place, it may also have followed at others, oftener than what was likeliest there.
    scores = [
        _followed(texts, text, proposal, length)
        for texts in ([text], past)
        for length in range(1, min(24, len(text)) + 1)
        if len(proposal) <= int(spec_factor * length)
    ]
    assert pytest.approx(expected) in scores


def _followed(texts: Sequence[Sequence[int]], text: Sequence[int], path: Sequence[int], length: int) -> float:
    """Expected accepted tokens of ``path`` after the last ``length`` tokens; 0 if it never followed."""
    string, prob, score = list(text[len(text) - length :]), 1.0, 0.0
    for token in path:
        num_before, num_after = len(places(texts, string)), len(places(texts, [*string, token]))
        prob *= num_after / num_before if num_before else 0.0
        string, score = [*string, token], score + prob
    return score if prob else 0.0


@pytest.mark.parametrize(
    ("tokens", "k", "expected"),
    [
        ([], 4, ()),
        ([1, 2, 3], 4, ()),
        # At most as many tokens as match, and as were asked for.
        ([1, 7, 8, 9, 1], 4, (7,)),
        ([1, 2, 7, 8, 9, 6, 1, 2], 4, (7, 8)),
        ([1, 2, 7, 8, 9, 6, 1, 2], 1, (7,)),
        # Twice 7, once 8, after the same tokens: the more frequent one, until nothing is likely any more.
        ([1, 2, 7, 5, 1, 2, 8, 4, 1, 2, 7, 3, 1, 2], 4, (7,)),
    ],
)
def test_proposal_is_the_likeliest_path(tokens: list[int], k: int, expected: tuple[int, ...]) -> None:
    proposer = SuffixProposer(min_prob=0.3)
    proposer.extend(tokens)
    assert proposer.num_tokens == len(tokens)
    assert proposer.propose(k).token_ids == expected


def test_length_follows_the_probability() -> None:
    # After 1 2 came 3 every time, and then something else each time.
    tokens = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6, 1, 2]
    sure, bold = SuffixProposer(min_prob=0.5), SuffixProposer(min_prob=0.05)
    sure.extend(tokens)
    bold.extend(tokens)
    assert sure.propose(8).token_ids == (3,)
    assert bold.propose(8).token_ids == (3, 6)


# Past outputs


def test_past_output_is_proposed_only_with_a_store() -> None:
    store = OutputStore(100)
    store.add([5, 6, 7, 8])
    alone, with_store = SuffixProposer(), SuffixProposer(store=store)
    for proposer in (alone, with_store):
        proposer.extend([1, 5, 6])
    assert alone.propose(4).token_ids == ()
    assert with_store.propose(4).token_ids == (7, 8)


def test_outputs_do_not_run_into_each_other() -> None:
    store = OutputStore(100)
    store.add([1, 2, 3])
    store.add([4, 5])
    proposer = SuffixProposer(store=store)
    proposer.extend([1, 2])
    assert proposer.propose(4).token_ids == (3,)


def test_store_is_bounded_and_drops_whole_outputs() -> None:
    store = OutputStore(20)
    for number in range(50):
        store.add([100 + number, 200 + number, 300 + number])
        assert store.num_tokens <= 20
    proposer = SuffixProposer(store=store)
    proposer.extend([149])
    assert proposer.propose(4).token_ids == (249,)
    gone = SuffixProposer(store=store)
    gone.extend([101])
    assert gone.propose(4).token_ids == ()


def test_output_that_is_used_stays() -> None:
    store = OutputStore(20)
    store.add([1, 2, 3])
    for number in range(50):
        store.add([100 + number, 200 + number, 300 + number])
        proposer = SuffixProposer(store=store)
        proposer.extend([1])
        assert proposer.propose(4).token_ids == (2,), number
        assert store.num_tokens <= 20


def test_output_longer_than_half_the_store_keeps_its_end() -> None:
    store = OutputStore(8)
    store.add(range(100))
    assert store.num_tokens == 4
    assert store.generations[0].find([96, 97]) is not None
    assert store.generations[0].find([94, 95]) is None


def test_stores_are_apart_and_off_by_default() -> None:
    stores = OutputStores(100, max_tenants=2)
    first = stores.of("a")
    assert first is not None
    assert stores.of("a") is first
    assert stores.of("b") is not first
    assert stores.of("") is None
    assert OutputStores(0).of("a") is None
    # "b" was not served for the longest time.
    stores.of("a")
    stores.of("c")
    assert len(stores) == 2
    assert stores.of("a") is first


def test_root_is_never_a_match() -> None:
    index = indexed([[1, 2, 1]])
    assert index.find([9]) is None
    assert index.tail_match() == index.find([1])
    assert indexed([[1, 2]]).tail_match() is None
