"""Bounds of the work that a grammar may cost, and llguidance's errors as one sentence."""

from __future__ import annotations

import re
from typing import Final

from llguidance import LLMatcher, LLParserLimits

_REWORDED: Final = (
    (re.compile(r"^(?:failed to compile JSON schema|Unsatisfiable schema): "), ""),
    (
        re.compile(r"^.*NoExtensionBias.*$"),
        "no text is of this grammar, or its first token is not in the vocabulary",
    ),
    (re.compile(r"^Unimplemented keys: \[(.*)\]$"), r"\1 is not supported"),
    (re.compile(r"^(Regex is empty).*$"), "no text has all of these forms"),
    (
        re.compile(r"^lookarounds not supported yet; \w+ in regex"),
        "look-around and word boundaries are not supported:",
    ),
    (re.compile(r"\. Enable '.*$"), ""),
)


def make_limits() -> LLParserLimits:
    """Counted work that a grammar may cost, in llguidance's own units; a lexer state is 1 to 2 kilobytes."""
    return LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_items_in_row=20_000,
        max_lexer_states=20_000,
        max_grammar_size=150_000,
        verbose_errors=False,
    )


def sentence(error: str) -> str:
    """What llguidance says, without its own form of the grammar and what it adds for debugging."""
    lines = re.sub(r"^at \d+\(\d+\): (?=failed to compile JSON schema)", "", error).splitlines()
    told = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    told = told.removeprefix("error: ").removesuffix(":").strip()
    for pattern, words in _REWORDED:
        told = pattern.sub(words, told)
    return told[:300]


def lark_refusal(source: str) -> str | None:
    """Why a Lark grammar cannot be enforced, whatever the vocabulary is; None: it can be."""
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(source), limits=make_limits())
    return sentence(error) if error else None
