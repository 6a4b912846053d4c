"""Grammars that an output must belong to: from what clients send to masks over the vocabulary.

llguidance is the only backend: it refuses what it cannot enforce, and bounds its work by counted steps rather
than by time. The state of a grammar is a function of its source and the output's token ids, so it can be made
anywhere: in the Ingress (which validates), the target's leader (which masks), the draft and the router (which
ask whether a token is legal).
"""

from specray.errors import GrammarError
from specray.grammar.compiler import GrammarCompiler
from specray.grammar.forms import grammar_of
from specray.grammar.matcher import GrammarMatcher, TokenMasks
from specray.grammar.output import GuidedOutputs
from specray.grammar.prepared import PreparedCompiler

__all__ = [
    "GrammarCompiler",
    "GrammarError",
    "GrammarMatcher",
    "GuidedOutputs",
    "PreparedCompiler",
    "TokenMasks",
    "grammar_of",
]
