"""gRPC layer: connections to engines, engine servers, and the public service.

Only this package imports ``grpc`` or generated code (``rpc/pb``). Others use it through
``specray.interfaces`` and, for the public service, ``specray.rpc.inference.server.InferenceHandler``.
"""

from pathlib import Path
from typing import Final

PROTO_PATH: Final = str(Path(__file__).parent / "pb" / "protos")
"""Path of the folder with ``specray/v1/inference.proto``, for the code generators of clients."""
