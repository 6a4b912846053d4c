"""Proposers that need no model of their own: what was said before is often said again.

Synchronous, in the router's process, and microseconds a call. Each session has one; whatever it proposes, the
target verifies, so that a bad proposal costs time and never a token.
"""

from specray.drafting.ngram import LONG_MATCH_LEN, NgramProposer
from specray.drafting.proposer import SessionProposer, make_proposer
from specray.drafting.store import OutputStore, OutputStores
from specray.drafting.suffix import SuffixProposer
from specray.drafting.suffix_index import SuffixIndex

__all__ = [
    "LONG_MATCH_LEN",
    "NgramProposer",
    "OutputStore",
    "OutputStores",
    "SessionProposer",
    "SuffixIndex",
    "SuffixProposer",
    "make_proposer",
]
