"""What must be said before anything else of the tests imports gRPC or starts a Ray.

Importing the package says what it asks of gRPC, as Ray does.
"""

from specray.serving.process_end import end_without_destructors

# Several Rays come and go in the process that runs all tests.
end_without_destructors()
