"""What the package asks of gRPC must be said before anything else of the tests imports gRPC, as Ray does."""

import specray  # noqa: F401
