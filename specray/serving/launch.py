"""Runs a whole service in the foreground for ``specray serve``, and ends all its processes."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Final

from specray.actors.causes import root_cause
from specray.config import EMBEDDED, Config
from specray.config.models import slug
from specray.environment import apply_ray_environment, external_ray_address
from specray.errors import ConfigError
from specray.serving.own_ray.ends import end_without_destructors
from specray.serving.own_ray.notes import noted
from specray.serving.own_ray.start import init_ray, restore_handlers, signal_handlers
from specray.serving.own_ray.watch import ray_parts, serve_parts, watched, within
from specray.serving.ports import claimed
from specray.tokenization.files import has_chat_template

APP_NAME = "specray"
LOOPBACK = "127.0.0.1"
KEEP_ALIVE_TIMEOUT_S = 90
SERVE_START_S = 180.0
EXIT_LOST = 1
POLL_INTERVAL_S = 0.1
ANSWER_S = 10.0
"""Seconds for the owner of models to say their states."""
STATUS_INTERVAL_S = 0.5
"""Seconds between two looks at Serve's status during a start. Each takes processor time that the start needs:
with ten a second, this process used a quarter of a core."""
SERVE_LOGS: Final = {"log_level": "WARNING", "enable_access_log": False}
"""Logging of Serve itself: a line for each call in each deployment would cost more than some calls."""
logger = logging.getLogger(__name__)


def run_service(config: Config) -> int:
    """Checks, starts, serves until SIGINT or SIGTERM, and stops everything it started.

    With ``RAY_ADDRESS`` set it joins that cluster and ends only the application; otherwise it starts a Ray of
    its own on loopback and ends it too.

    Returns:
        The process's exit code.

    Raises:
        ConfigError: a port is taken, a model is missing or unfit, or the service could not start.
    """
    with _stop_signals() as stop, running_service(config, stop=stop, on_lost=_end_lost):
        if not stop.is_set():
            _announce(config)
        stop.wait()
        print("specray: stopping", file=sys.stderr, flush=True)
    return 0


def end_time_s(config: Config) -> float:
    return config.router.drain_timeout_s + 35.0


def _end_lost(reason: str) -> None:
    """Ends this process at once, since an orderly end calls Ray; ``cli.ending`` ends what it has started."""
    print(f"specray: {reason}", file=sys.stderr, flush=True)
    os._exit(EXIT_LOST)


@contextmanager
def running_service(
    config: Config,
    *,
    stop: threading.Event | None = None,
    deploy: Callable[[Config], None] | None = None,
    on_lost: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Runs the service while the block runs; it is ready when the block starts.

    Every process that it started has ended when this returns.

    Args:
        stop: event that gives up a start in progress; the block is entered at once then.
        deploy: gives the application to Serve, under ``APP_NAME``; default: as ``serve run`` does.
        on_lost: gets a sentence when a part of Ray is lost, in another thread; calls of Ray may hang then.
            None: nobody looks.

    Raises:
        ConfigError: as :func:`run_service`.
    """
    stop = stop or threading.Event()
    store = f"{APP_NAME}-{secrets.token_hex(8)}"
    check_ports_are_free(config)
    with ExitStack() as stack:
        for field, host, port in _ports(config) if deploy is None else ():
            stack.enter_context(claimed(field, host, port, service=store))
        check_models(config)
        config = with_own_server(config)
        stack.enter_context(_ray(config, on_lost))
        with (
            _deployed(config, deploy or partial(_run, store=store), store, on_lost),
            watched(serve_parts, on_lost),
        ):
            timeout_s = config.router.start_timeout_s + 60.0
            wait_running(stop, timeout_s=timeout_s)
            wait_loaded(config, stop, timeout_s=timeout_s)
            yield


@contextmanager
def _deployed(
    config: Config,
    deploy: Callable[[Config], None],
    store: str,
    on_lost: Callable[[str], None] | None,
) -> Iterator[None]:
    from ray import serve

    from specray.actors.live import AdapterNames, forget_stored
    from specray.actors.models.applications import store_key, store_of

    with within(SERVE_START_S, "Ray Serve did not start", on_lost):
        serve.start(
            proxy_location="HeadOnly" if config.http.server == "proxy" else "Disabled",
            http_options={
                "host": config.http.host,
                "port": config.http.port,
                # The router ends a request at its own deadline first, with a message.
                "request_timeout_s": config.router.request_timeout_s + 30.0,
                "keep_alive_timeout_s": KEEP_ALIVE_TIMEOUT_S,
            },
            logging_config=SERVE_LOGS,
        )
    try:
        print("specray: loading the models", file=sys.stderr, flush=True)
        with within(SERVE_START_S, "Ray Serve did not take the application", on_lost):
            deploy(config)
        yield
    finally:
        # In a cluster that was there before, other applications stay. The owner of models goes first.
        serve.delete(APP_NAME)
        for app in _model_apps(config):
            serve.delete(app)
        for key in (store, store_key(store), *(store_of(store, each.name) for each in config.models)):
            forget_stored(key)
        for name in ("", *(model.name for model in config.models)):
            AdapterNames(f"{store}-{slug(name)}" if name else store).forget()


def with_own_server(config: Config) -> Config:
    """Lets the Ingress listen itself, unless the configuration says otherwise or a cluster is joined.

    In a cluster the Ingress may be on any node, where nobody looks for it; a proxy is on the head.
    """
    if config.http.server != "auto":
        return config
    server = "ingress" if external_ray_address() is None else "proxy"
    return config.model_copy(update={"http": config.http.model_copy(update={"server": server})})


def check_ports_are_free(config: Config) -> None:
    """Raises ConfigError, naming the port, if another process listens on it."""
    for field, host, port in _ports(config):
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                # A socket in TIME_WAIT does not stop the servers; a listener does.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise ConfigError(f"{field}: cannot listen on {host}:{port}: {error.strerror}") from None
    if config.grpc.port == config.http.port:
        raise ConfigError(f"grpc.port: {config.grpc.port} is http.port as well; they must differ")


def _ports(config: Config) -> list[tuple[str, str, int]]:
    http, grpc = config.http, config.grpc
    return [
        ("http.port", http.host, http.port),
        *([("grpc.port", grpc.host, grpc.port)] if grpc.port else []),
    ]


def check_models(config: Config) -> None:
    """Reads both models' configuration and tokenizer, so that a wrong pair fails before Ray starts.

    Raises:
        ConfigError: a file is missing, an architecture is not supported, the tokenizers differ, or the target
            cannot verify what is drafted.
    """
    from specray.engine import preflight

    preflight.check_models(config)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Yields an event that SIGINT and SIGTERM set; further signals change nothing."""
    stop = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _ray(config: Config, on_lost: Callable[[str], None] | None) -> Iterator[None]:
    is_own = not external_ray_address()
    if is_own:
        apply_ray_environment(config.rpc)
    import ray

    from specray.serving.app import num_cpus

    handlers = signal_handlers()
    print("specray: starting Ray", file=sys.stderr, flush=True)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    end_without_destructors()
    if is_own:
        context = init_ray(
            # Without this, Ray would join the last cluster for which `ray start` left a note.
            address="local",
            # Logical CPUs: on a laptop the parts share the cores.
            num_cpus=max(os.cpu_count() or 1, math.ceil(num_cpus(config))),
            include_dashboard=False,
            logging_level=logging.WARNING,
            log_to_driver=config.logging.terminal,
            _node_ip_address=LOOPBACK if config.rpc.listen == "loopback" else None,
        )
        session = context.address_info["session_dir"]
        print(f"specray: logs of all processes: {session}/logs", file=sys.stderr, flush=True)
    else:
        context = ray.init(logging_level=logging.WARNING, log_to_driver=True)
    restore_handlers(handlers)
    try:
        note = noted(config.http.port, context.address_info["address"]) if is_own else nullcontext()
        with note, watched(lambda: ray_parts(context, is_own=is_own), on_lost):
            yield
    finally:
        ray.shutdown()


def _run(config: Config, *, store: str) -> None:
    from ray import serve

    from specray.serving.app import bind_app

    # serve.run would wait and never look at the stop event.
    target = serve.RunTarget(
        bind_app(config, store=store), name=APP_NAME, route_prefix="/", logging_config=SERVE_LOGS
    )
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def wait_running(stop: threading.Event, *, timeout_s: float) -> None:
    """Waits until every deployment is ready, or a stop is asked for.

    Raises:
        ConfigError: a deployment could not start, or not in time.
    """
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    end = time.monotonic() + timeout_s
    while not stop.wait(STATUS_INTERVAL_S):
        overview = serve.status().applications.get(APP_NAME)
        if overview is None or overview.status in (
            ApplicationStatus.NOT_STARTED,
            ApplicationStatus.DEPLOYING,
        ):
            if time.monotonic() > end:
                raise ConfigError(f"the service did not start within {timeout_s:g} s")
            continue
        if overview.status is ApplicationStatus.RUNNING:
            return
        reasons = [overview.message, *(part.message for part in overview.deployments.values())]
        raise ConfigError(f"the service did not start: {root_cause(reasons)}")


def wait_loaded(config: Config, stop: threading.Event, *, timeout_s: float) -> None:
    """Waits until the models that several are to start with are loaded, or a stop is asked for.

    Raises:
        ConfigError: one could not be loaded, or not in time.
    """
    from ray import serve

    wanted = [model.name for model in config.models if model.load == "start"]
    handle = serve.get_deployment_handle("Models", app_name=APP_NAME) if wanted else None
    end = time.monotonic() + timeout_s * len(wanted)
    while handle is not None and not stop.wait(STATUS_INTERVAL_S):
        statuses = handle.statuses.remote().result(timeout_s=ANSWER_S)
        if all(statuses[name].state == "loaded" for name in wanted):
            return
        for name in wanted:
            if statuses[name].state == "failed":
                raise ConfigError(f"model {name!r} could not be loaded: {statuses[name].reason}")
        if time.monotonic() > end:
            raise ConfigError(f"the models were not loaded within {timeout_s * len(wanted):g} s")


def _model_apps(config: Config) -> list[str]:
    """Applications of the service beside its own that are there."""
    if not config.models:
        return []
    from ray import serve

    from specray.actors.models.applications import app_of, app_of_pool

    apps = [app_of(each.name) for each in config.models] + [app_of_pool(each.name) for each in config.drafts]
    there = serve.status().applications
    return [app for app in apps if app in there]


def _announce(config: Config) -> None:
    url = f"http://{config.http.host}:{config.http.port}"
    grpc = f"{config.grpc.host}:{config.grpc.port}" if config.grpc.port else "off"
    alone = config.of_model(config.models[0].name) if config.models else config
    path, body = example_call(alone)
    ends = "" if config.models else _named_ends()
    print(
        f"""
specray serves {_served(config)}
  HTTP  {url}/v1   (OpenAI-compatible)
  gRPC  {grpc}   (specray.v1.InferenceService){ends}

Try it:
  curl {url}{path} -H 'Content-Type: application/json' \\
    -d '{body}'

Ctrl-C stops every process.""",
        flush=True,
    )


def _served(config: Config) -> str:
    """What is served, for people."""
    lines = list[str]()
    if not config.models:
        draft = config.draft.model if config.draft.enabled else "none"
        return f"{config.model_name}  (target {config.target.model}, draft {draft})"
    for model in config.models:
        alone = config.of_model(model.name)
        draft = alone.draft.model if alone.draft.enabled else "none"
        loads = "" if model.load == "start" else ", loaded on demand"
        lines.append(f"  {model.name}  (target {alone.target.model}, draft {draft}{loads})")
    return "\n".join([f"{len(lines)} models", *lines])


def _named_ends() -> str:
    """A line with the tokens that end an output, which the Ingress knows; nothing if it does not answer."""
    from ray import serve

    from specray.actors.client import SERVE_ERRORS

    try:
        handle = serve.get_deployment_handle("Ingress", app_name=APP_NAME)
        ends: str = handle.named_ends.remote().result(timeout_s=5.0)
    except (TimeoutError, *SERVE_ERRORS) as error:
        logger.debug("the Ingress does not tell what ends an output: %s", error)
        return ""
    return f"\n  Ends  {ends}"


def example_call(config: Config) -> tuple[str, str]:
    request: dict[str, object] = {"model": config.model_name}
    if config.target.model != EMBEDDED and has_chat_template(config.target.model):
        question = {"role": "user", "content": "What is the capital of France?"}
        return "/v1/chat/completions", json.dumps(
            request | {"messages": [question], "max_tokens": 64, "temperature": 0}
        )
    return "/v1/completions", json.dumps(request | {"prompt": "def fibonacci(n):\n", "max_tokens": 64})
