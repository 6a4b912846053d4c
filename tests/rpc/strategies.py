"""Hypothesis strategies of the values that messages of engines and of the public service share."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from hypothesis import strategies as st

from specray.types import DraftKind, Grammar, GrammarKind, TokenLogprobs, Verification

T = TypeVar("T")

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


BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: U32,
    float: F32,
    str: TEXT,
    bytes: st.binary(max_size=32),
    bool: st.booleans(),
    tuple[int, ...]: IDS,
    tuple[str, ...]: tuples_of(TEXT),
    tuple[bytes, ...]: tuples_of(st.binary(max_size=32)),
    tuple[tuple[int, ...], ...]: tuples_of(IDS),
    tuple[tuple[int, float], ...]: tuples_of(st.tuples(U32, F32)),
    Verification: st.sampled_from(Verification),
    DraftKind: st.sampled_from(DraftKind),
    Grammar: st.builds(Grammar, st.sampled_from(GrammarKind), TEXT),
}


def built(
    kind: type[T], names: Iterable[str] | None = None, **over: st.SearchStrategy[Any]
) -> st.SearchStrategy[T]:
    """Values of a dataclass whose fields (those of ``names``) are drawn by their types."""
    hints = get_type_hints(kind)
    drawn = {name: over[name] if name in over else _of(hints[name]) for name in names or hints}
    return st.builds(kind, **drawn)


def _of(hint: Any) -> st.SearchStrategy[Any]:
    if hint in BY_TYPE:
        return BY_TYPE[hint]
    (inner,) = (each for each in get_args(hint) if each is not NoneType)
    return st.none() | BY_TYPE[inner]
