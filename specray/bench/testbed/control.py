"""The process that owns a service under test: the Ray driver, on whichever host it runs.

Run as ``python -m specray.bench.testbed.control CONFIG --mode local|join|cluster``. It starts the service,
writes one line of JSON when that is ready, and then answers lines of JSON until its standard input is closed;
then it ends everything it started. ``specray.bench.testbed.service`` is the other end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specray.bench.testbed.parts import living_parts
from specray.config import Config, load_config
from specray.errors import EngineLostError, SpecrayError
from specray.rpc.workers.parent import end_with_parent

DRAFT_RESOURCE = "specray_draft_node"
"""Ray resource of nodes on which drafts may live, where there are several nodes."""
TARGET_RESOURCE = "specray_target_node"
NUM_CPUS_PER_NODE = 8
"""Logical CPUs per node: on a laptop the parts share the cores."""

Handler = Callable[..., Any]


@contextmanager
def serving(config: Config, mode: str) -> Iterator[dict[str, Handler]]:
    """Runs the service; yields the operations that can be asked for."""
    from specray.serving.launch import running_service

    if mode == "local":
        with running_service(config):
            yield dict(_HANDLERS)
        return
    from specray.bench.testbed.declared import Declaration

    declaration = Declaration()
    handlers = {**_HANDLERS, "upgrade": declaration.upgrade}
    with ExitStack() as stack:
        if mode == "cluster":
            handlers |= stack.enter_context(_cluster())
        stack.enter_context(running_service(config, deploy=declaration.deploy))
        yield handlers


@contextmanager
def _cluster() -> Iterator[dict[str, Handler]]:
    """Starts a head node and one node for the draft, as processes that share this machine's address."""
    from ray.cluster_utils import Cluster

    from specray.serving.own_ray.ends import children, end_children
    from specray.serving.own_ray.nodes import lean_head, one_agent

    # Ray takes 127.0.0.1 for the machine's own address when it joins; so these nodes are there.
    shared: dict[str, Any] = {
        "num_cpus": NUM_CPUS_PER_NODE,
        "object_store_memory": 100 * 1024 * 1024,
        "include_dashboard": False,
    }
    with one_agent(), lean_head(log_to_driver=False):
        cluster = Cluster(
            initialize_head=True,
            head_node_args={**shared, "resources": {TARGET_RESOURCE: 1}},
        )

    def add() -> Any:
        before = children()
        try:
            with one_agent(), lean_head(log_to_driver=False):
                return cluster.add_node(**shared, resources={DRAFT_RESOURCE: 1})
        except Exception:
            # What has come up of it would join later.
            end_children(children() - before)
            raise

    nodes = [add()]

    def remove_node() -> None:
        cluster.remove_node(nodes.pop(0), allow_graceful=False)

    def add_node() -> None:
        nodes.append(add())

    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield {"remove_node": remove_node, "add_node": add_node, "num_nodes": lambda: len(nodes)}
    finally:
        cluster.shutdown()


def _parts() -> list[dict[str, Any]]:
    # The state API would need Ray's dashboard, whose processes are not the service's.
    from ray._private.state import actors

    return [asdict(part) for part in living_parts(actors())]


def _running() -> dict[str, int]:
    from ray import serve
    from ray.serve._private.common import ReplicaState

    running = Counter[str]()
    for application in serve.status().applications.values():
        for name, deployment in application.deployments.items():
            running[name] += deployment.replica_states.get(ReplicaState.RUNNING, 0)
    return running


def _drain(node_id: str) -> None:
    import ray
    from ray.core.generated import autoscaler_pb2

    # As `ray drain-node` does it; there is no public function.
    private: Any = ray._raylet
    messages: Any = autoscaler_pb2
    client = private.GcsClient(address=ray.get_runtime_context().gcs_address)
    is_accepted, reason = client.drain_node(
        node_id,
        messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "the test bed replaces it",
        time.time_ns() // 1_000_000 + 60_000,
    )
    if not is_accepted:
        raise EngineLostError(f"the node cannot be drained: {reason}")


_HANDLERS: dict[str, Handler] = {"parts": _parts, "running": _running, "drain": _drain}


def answer(handlers: dict[str, Handler], lines: Iterator[str], write: Callable[[str], None]) -> None:
    """Answers lines ``{"op": NAME, "arguments": [...]}`` until the last.

    An answer is one line, ``{"value": ...}`` or ``{"error": TEXT}``, with the question's ``id``.
    """
    for line in lines:
        asked = json.loads(line)
        try:
            reply: dict[str, Any] = {"value": handlers[asked["op"]](*asked.get("arguments", ()))}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        write(json.dumps({"id": asked.get("id"), **reply}))


def main() -> int:
    """Returns the exit code: 0 after an orderly end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--mode", choices=("local", "join", "cluster"), required=True)
    arguments = parser.parse_args()
    end_with_parent(os.getppid())
    # Output of libraries must not mix with the answers.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    lock = threading.Lock()

    def write(text: str) -> None:
        with lock:
            print(text, file=replies)

    try:
        with serving(load_config(arguments.config), arguments.mode) as handlers:
            write(json.dumps({"id": 0, "value": "ready"}))
            answer(handlers, iter(sys.stdin.readline, ""), write)
    except SpecrayError as error:
        write(json.dumps({"id": 0, "error": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
