"""Tensor-parallel targets on Ray: placement, ranks, and the group that starts and ends as one."""
