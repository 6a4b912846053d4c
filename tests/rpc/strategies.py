"""Hypothesis strategies of the values that messages of engines and of the public service share."""

from __future__ import annotations

from hypothesis import strategies as st

from specray.types import TokenLogprobs

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
F32 = st.floats(width=32, allow_nan=False)
TEXT = st.text(max_size=20)
IDS = st.lists(U32, max_size=6).map(tuple)


def tuples_of(
    strategy: st.SearchStrategy, *, size: int | None = None, max_size: int = 4
) -> st.SearchStrategy:
    if size is not None:
        return st.lists(strategy, min_size=size, max_size=size).map(tuple)
    return st.lists(strategy, max_size=max_size).map(tuple)


@st.composite
def token_logprobs(draw: st.DrawFn) -> TokenLogprobs:
    top = draw(IDS)
    return TokenLogprobs(draw(U32), draw(F32), top, draw(tuples_of(F32, size=len(top))))
