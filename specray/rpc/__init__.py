"""gRPC layer: connections to engines, engine servers, and the public service.

Only this package imports ``grpc`` or generated code (``rpc/pb``). Others use it through
``specray.interfaces`` and, for the public service, ``specray.rpc.inference.server.InferenceHandler``.
"""
