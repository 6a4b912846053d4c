"""Turns what exceptions of libraries say into parts of one sentence."""

from __future__ import annotations

_MAX_CHARS = 400
"""Characters taken of an exception's text."""


def one_line(error: BaseException) -> str:
    """The exception's text on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ..."


def first_line(error: BaseException) -> str:
    """The first line of the exception's text, after its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:_MAX_CHARS]}" if lines else type(error).__name__
