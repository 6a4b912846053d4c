"""Chooses the Router of a request: the one that answers soonest, by its load and by what its cache holds."""

from specray.routing.choice import Choice, RouterChoice
from specray.routing.prefix_map import PrefixMap
from specray.routing.shared import SharedChoice, shared_choice

__all__ = ["Choice", "PrefixMap", "RouterChoice", "SharedChoice", "shared_choice"]
