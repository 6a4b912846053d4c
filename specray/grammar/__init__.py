"""Grammars that an output must belong to: from what clients send to masks over the vocabulary.

llguidance is the only backend: it refuses what it cannot enforce, and bounds its work by counted steps rather
than by time. The state of a grammar is a function of its source and the output's token ids, so it can be made
anywhere: in the Ingress (which validates), the target's leader (which masks), the draft and the router (which
ask whether a token is legal).
"""

from specray.errors import GrammarError
from specray.grammar.bounds import lark_refusal
from specray.grammar.compiler import MAX_SOURCE_LEN, GrammarCompiler, PreparedCompiler
from specray.grammar.endless import resolve
from specray.grammar.forms import MAX_TEXT_LEN, WHITESPACE, grammar_of, least_length
from specray.grammar.matcher import GrammarMatcher, TokenMasks
from specray.grammar.output import GuidedOutputs
from specray.grammar.schemas import common_refusal, enforced, plain, refusal
from specray.grammar.sources import named_tokens, slashed

__all__ = [
    "MAX_SOURCE_LEN",
    "MAX_TEXT_LEN",
    "WHITESPACE",
    "GrammarCompiler",
    "GrammarError",
    "GrammarMatcher",
    "GuidedOutputs",
    "PreparedCompiler",
    "TokenMasks",
    "common_refusal",
    "enforced",
    "grammar_of",
    "lark_refusal",
    "least_length",
    "named_tokens",
    "plain",
    "refusal",
    "resolve",
    "slashed",
]
