"""What the package asks of gRPC must be said before anything else of the tests imports gRPC, as Ray does."""

import specray  # noqa: F401
from specray.serving.process_end import end_without_destructors

# Several Rays come and go in the process that runs all tests.
end_without_destructors()
