"""``specray serve``: a whole service in the foreground, from the first check to the last process ended."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from specray.config import Config, external_ray_address
from specray.errors import ConfigError

APP_NAME = "specray"
LOOPBACK = "127.0.0.1"
HTTP_TIMEOUT_MARGIN_S = 30.0
KEEP_ALIVE_TIMEOUT_S = 90


def run_service(config: Config) -> int:
    """Checks, starts, serves until SIGINT or SIGTERM, and stops everything it started.

    With ``RAY_ADDRESS`` set it joins that cluster and ends only the application; otherwise it starts a Ray of
    its own on loopback and ends it too.

    Returns:
        The process's exit code.

    Raises:
        ConfigError: a port is taken, a model is missing or unfit, or the service could not start.
    """
    with _stop_signals() as stop, running_service(config, stop=stop):
        if not stop.is_set():
            _announce(config)
        stop.wait()
        print("specray: stopping", file=sys.stderr, flush=True)
    return 0


@contextmanager
def running_service(config: Config, *, stop: threading.Event | None = None) -> Iterator[None]:
    """The service, ready, for as long as the context lasts; then every process it started has ended.

    Args:
        stop: when set, a start in progress is given up and the context is entered at once.

    Raises:
        ConfigError: as :func:`run_service`.
    """
    stop = stop or threading.Event()
    check_ports_are_free(config)
    check_models(config)
    with _ray(config):
        from ray import serve

        from specray.serving.app import build_app

        serve.start(
            proxy_location="HeadOnly",
            http_options={
                "host": config.http.host,
                "port": config.http.port,
                # The router ends a request at its own deadline first, with a message.
                "request_timeout_s": config.router.request_timeout_s + HTTP_TIMEOUT_MARGIN_S,
                "keep_alive_timeout_s": KEEP_ALIVE_TIMEOUT_S,
            },
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        try:
            _deploy(build_app(config), stop)
            yield
        finally:
            serve.shutdown()


def check_ports_are_free(config: Config) -> None:
    """Raises ConfigError naming the port that somebody else listens on."""
    ports = [("http.port", config.http.host, config.http.port)]
    if config.grpc.port:
        ports.append(("grpc.port", config.grpc.host, config.grpc.port))
    for field, host, port in ports:
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                # A socket in TIME_WAIT is no obstacle for the servers either; a listener is.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise ConfigError(f"{field}: cannot listen on {host}:{port}: {error.strerror}") from None
    if config.grpc.port == config.http.port:
        raise ConfigError(f"grpc.port: {config.grpc.port} is http.port as well; they must differ")


def check_models(config: Config) -> None:
    """Reads both models' configuration and tokenizer, so that what cannot work fails before Ray starts.

    Raises:
        ConfigError: a file is missing, an architecture is not supported, or the tokenizers differ.
    """
    from specray.engine.preflight import check_pair

    check_pair(config.target, config.draft if config.draft.enabled else None)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second signal changes nothing, the stop is under way."""
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
def _ray(config: Config) -> Iterator[None]:
    import ray

    from specray.serving.app import num_cpus

    print("specray: starting Ray", file=sys.stderr, flush=True)
    if external_ray_address():
        ray.init(logging_level=logging.WARNING, log_to_driver=True)
    else:
        ray.init(
            # Logical CPUs: on a laptop the parts share what there is.
            num_cpus=max(os.cpu_count() or 1, math.ceil(num_cpus(config))),
            include_dashboard=False,
            logging_level=logging.WARNING,
            log_to_driver=False,
            _node_ip_address=LOOPBACK,
        )
    try:
        yield
    finally:
        ray.shutdown()


def _deploy(app: object, stop: threading.Event) -> None:
    """Deploys and waits until every part is ready, or a stop is asked for.

    serve.run waits in small steps without looking at our event, so it runs on a thread of its own; when the
    user stops first, the shutdown that follows ends its wait.
    """
    from ray import serve

    failure: list[BaseException] = []

    def deploy() -> None:
        try:
            serve.run(app, name=APP_NAME, route_prefix="/")  # type: ignore[arg-type]
        except BaseException as error:
            failure.append(error)

    print("specray: loading the models", file=sys.stderr, flush=True)
    thread = threading.Thread(target=deploy, name="deploy", daemon=True)
    thread.start()
    while thread.is_alive() and not stop.is_set():
        thread.join(timeout=0.2)
    if failure and not stop.is_set():
        raise ConfigError(f"the service did not start: {failure[0]}") from failure[0]


def _announce(config: Config) -> None:
    url = f"http://{config.http.host}:{config.http.port}"
    grpc = f"{config.grpc.host}:{config.grpc.port}" if config.grpc.port else "off"
    draft = config.draft.model if config.draft.enabled else "none"
    body = f'{{"model": "{config.model_name}", "prompt": "def fibonacci(n):\\n", "max_tokens": 64}}'
    print(
        f"""
specray serves {config.model_name}  (target {config.target.model}, draft {draft})
  HTTP  {url}/v1   (OpenAI-compatible)
  gRPC  {grpc}   (specray.v1.InferenceService)

Try it:
  curl {url}/v1/completions -H 'Content-Type: application/json' \\
    -d '{body}'

Ctrl-C stops every process.""",
        flush=True,
    )
