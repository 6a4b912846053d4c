"""Model-free proposers, which propose tokens that followed the same context before.

They run synchronously in the router's process, in microseconds per call. Each session has one. The target
verifies every proposal, so a bad one costs time but never correctness.
"""

from specray.drafting.ngram import LONG_MATCH_LEN, NgramProposer
from specray.drafting.prediction import PredictionProposer
from specray.drafting.proposer import LookaheadProposer, SessionProposer, make_proposer
from specray.drafting.store import OutputStore, OutputStores
from specray.drafting.suffix import SuffixProposer
from specray.drafting.suffix_index import SuffixIndex

__all__ = [
    "LONG_MATCH_LEN",
    "LookaheadProposer",
    "NgramProposer",
    "OutputStore",
    "OutputStores",
    "PredictionProposer",
    "SessionProposer",
    "SuffixIndex",
    "SuffixProposer",
    "make_proposer",
]
