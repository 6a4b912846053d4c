"""A layer of experts on CPU, in kernels whose arguments do not depend on the routing."""
