"""Adapters of the servers that ``specray bench compare`` measures: specray itself and its peers.

An adapter knows how its server is started and which fields its requests need; ``process`` starts, awaits and
stops all of them.
"""

from specray.bench.compare.peers.base import Launch, PeerArm, Setup, System, parse_arm
from specray.bench.compare.peers.process import running

__all__ = ["Launch", "PeerArm", "Setup", "System", "parse_arm", "running"]
