"""gRPC: the connections to engines, their servers, and the public service.

The only package that imports ``grpc`` or generated code (``rpc/pb``). Everything else meets it at
``specray.interfaces`` and, for the public service, at ``specray.rpc.inference.server.InferenceHandler``.
"""
