"""Children of a process that uses gRPC: what Ray does to start its own programs."""

from __future__ import annotations

import os
import subprocess
import sys

NUM_FORKS = 150

SCRIPT = f"""
import asyncio, subprocess, sys, threading

import specray.rpc.channel
import grpc
from grpc import aio

busy, stop = threading.Event(), threading.Event()


class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        async def echo(request, context):
            return request
        return grpc.unary_unary_rpc_method_handler(echo)


async def talk():
    server = aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    while not stop.is_set():
        async with aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
            for _ in range(5):
                await channel.unary_unary("/echo/echo")(b"x", timeout=10)
        busy.set()
    await server.stop(0)


talking = threading.Thread(target=lambda: asyncio.run(talk()), daemon=True)
talking.start()
assert busy.wait(20)
# preexec_fn has subprocess fork, with the handlers of all libraries; without it there is only a vfork.
codes = [subprocess.Popen(["true"], preexec_fn=int).wait(10) for _ in range({NUM_FORKS})]
assert talking.is_alive()
stop.set()
talking.join(20)
print(sorted(set(codes)))
"""


def test_every_child_of_a_process_that_uses_grpc_reaches_its_program() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=90
    )
    assert (done.stdout.strip(), done.returncode) == ("[0]", 0), done.stderr[-2000:]


def test_who_wants_the_handlers_keeps_them() -> None:
    script = "import specray, os; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    environment = os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == "1"
