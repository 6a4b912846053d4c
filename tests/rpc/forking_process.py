"""A process that uses gRPC and forks, run as a program or called."""

from __future__ import annotations

import asyncio
import subprocess
import threading

import specray.rpc.channel  # noqa: F401  # Before gRPC, as in every process of the package.

import grpc  # isort: skip
from grpc import aio  # isort: skip

TIMEOUT_S = 20
NUM_FORKS = 80
"""Number of children; with gRPC's handlers about one in ten crashes or hangs."""


class Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def echo(request: bytes, context: object) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


def exit_codes(num_forks: int = NUM_FORKS) -> list[int]:
    """Distinct exit codes of so many children, ascending, while another thread uses gRPC."""
    busy, stop = threading.Event(), threading.Event()

    async def talk() -> None:
        server = aio.server()
        server.add_generic_rpc_handlers((Echo(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        while not stop.is_set():
            async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                for _ in range(5):
                    await channel.unary_unary("/echo/echo")(b"x", timeout=10)
            busy.set()
        await server.stop(0)

    talking = threading.Thread(target=lambda: asyncio.run(talk()), daemon=True)
    talking.start()
    assert busy.wait(TIMEOUT_S)
    # preexec_fn has subprocess fork, with the handlers of all libraries; without it there is only a vfork.
    codes = [subprocess.Popen(["true"], preexec_fn=int).wait(10) for _ in range(num_forks)]
    assert talking.is_alive(), "no fork has hurt the parent"
    stop.set()
    talking.join(TIMEOUT_S)
    return sorted(set(codes))


if __name__ == "__main__":
    print(exit_codes())
