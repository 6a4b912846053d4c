"""Tensor-parallel targets on Ray: placement, ranks, and the group that lives and ends as one."""
