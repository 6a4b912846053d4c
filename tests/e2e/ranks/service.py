"""Facts of the service of ranks that its tests must know."""

from __future__ import annotations

TENSOR_PARALLEL_SIZE = 2
"""Number of ranks of the target, and of the draft."""
