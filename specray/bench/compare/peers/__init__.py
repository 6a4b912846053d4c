"""The systems that ``specray bench compare`` measures: specray itself and its peers, one adapter each.

An adapter only says how its server is started and what it wants in a request; starting, waiting for it and
stopping are the same for all (``process``).
"""

from specray.bench.compare.peers.base import Arm, Launch, Setup, System, parse_arm
from specray.bench.compare.peers.process import running

__all__ = ["Arm", "Launch", "Setup", "System", "parse_arm", "running"]
