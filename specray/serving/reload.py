"""Brings live values into force in a running service, for ``specray reload``."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from specray.config import Config, RpcConfig
from specray.config.live import KeyChange, Served, Values, changes, check_live, digest, split
from specray.config.service import DEFAULTS_OF_MODELS
from specray.environment import apply_ray_environment, external_ray_address
from specray.errors import ConfigError
from specray.serving.launch import APP_NAME
from specray.serving.own_ray.notes import AUTH_VARIABLES, find_note

ASK_TIMEOUT_S: Final = 10.0
"""Seconds for an Ingress to tell its configuration, and for replicas to answer one call."""
_POLL_S: Final = 0.25


def reload_service(
    wanted: Callable[[Values], Config], *, port: int | None = None, timeout_s: float = 60.0
) -> list[KeyChange]:
    """Changes a running service to another configuration, without a new start of anything.

    Args:
        wanted: makes the configuration from the one that is served.
        port: HTTP port, to tell several services on this machine apart.
        timeout_s: seconds for all replicas to confirm.

    Returns:
        What has changed.

    Raises:
        ConfigError: there is no such service, a change needs a new start (nothing has changed then), or not
            every replica has confirmed in time.
    """
    with _connected(port):
        served = _ask()
        new = wanted(served.values)
        found = changes(Config.model_validate(served.values), new)
        check_live(found)
        check_defaults(new, found)
        if served.store is None:
            raise ConfigError(
                "this service was deployed by Serve's own configuration; write live values under user_config "
                "of its deployments there, and deploy it again"
            )
        if found:
            _apply(served, new, timeout_s=timeout_s)
        return found


def check_defaults(new: Config, found: Sequence[KeyChange]) -> None:
    """Raises ConfigError for a change of a default of several models that changes none of them."""
    of_models = {change.key for change in found if change.model}
    for change in found:
        section = change.key.partition(".")[0]
        if new.models and section in DEFAULTS_OF_MODELS and change.key not in of_models:
            raise ConfigError(
                f"{change}: {section} beside models is a default, and each has a value of its own; allowed: "
                f"models.NAME.{change.key} of {', '.join(each.name for each in new.models)}"
            )


@contextmanager
def _connected(port: int | None) -> Iterator[None]:
    """Joins the Ray of the service: RAY_ADDRESS, or the one of which this user's service left a note."""
    address = external_ray_address()
    if address is None:
        note = find_note(port)
        address = note.address
        for name in AUTH_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(note.environment)
        apply_ray_environment(RpcConfig.model_validate({}))
    import ray

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        ray.init(address, logging_level=logging.WARNING, log_to_driver=False)
    # Ray raises several kinds, also plain ones.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"the Ray at {address} cannot be joined: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _ask() -> Served:
    from ray import serve

    from specray.actors.client import SERVE_ERRORS

    if APP_NAME not in serve.status().applications:
        raise ConfigError(f"no application named {APP_NAME} runs in this Ray")
    try:
        handle = serve.get_deployment_handle("Ingress", app_name=APP_NAME)
        served: Served = handle.served.remote().result(timeout_s=ASK_TIMEOUT_S)
    except (TimeoutError, *SERVE_ERRORS) as error:
        raise ConfigError(
            f"the service does not tell its configuration within {ASK_TIMEOUT_S:g} s: {error}"
        ) from error
    return served


def _apply(served: Served, new: Config, *, timeout_s: float) -> None:
    """Stores the values for replicas that start, and calls those that serve until all have confirmed."""
    from specray.actors.live import write_stored
    from specray.actors.models.applications import app_of, store_of

    assert served.store is not None
    live = split(new)[1]
    write_stored(served.store, live)
    of_apps = {APP_NAME: live}
    for model in new.models:
        of_apps[app_of(model.name)] = split(new.of_model(model.name))[1]
        write_stored(store_of(served.store, model.name), of_apps[app_of(model.name)])
    began_s = time.monotonic()
    while True:
        missing = [
            text
            for app, name in _deployments(served, of_apps)
            if (text := not_confirmed(app, name, of_apps[app], began_s))
        ]
        if not missing:
            return
        if time.monotonic() - began_s > timeout_s:
            raise ConfigError(
                f"not confirmed within {timeout_s:g} s: {', '.join(missing)}; replicas that start take the "
                "new values, and the same command may be repeated"
            )
        time.sleep(_POLL_S)


def _deployments(served: Served, apps: Collection[str]) -> list[tuple[str, str]]:
    """The deployments that take live values, of the service's own application and of loaded models."""
    from ray import serve

    there = serve.status().applications
    models = [app for app in apps if app != APP_NAME and app in there]
    of_models = [(app, name) for app in models for name in there[app].deployments]
    return [*((APP_NAME, name) for name in served.deployments), *of_models]


def not_confirmed(app: str, name: str, live: Values, began_s: float) -> str:
    """Brings the values to all replicas of a deployment; says which do not have them yet, or nothing."""
    from ray import serve

    application = serve.status().applications.get(app)
    if application is None or name not in application.deployments:
        # A model that was unloaded meanwhile.
        return ""
    counts = application.deployments[name].replica_states
    states = {str(getattr(state, "value", state)): count for state, count in counts.items()}
    num_running = states.get("RUNNING", 0)
    num_coming = sum(states.get(state, 0) for state in ("STARTING", "UPDATING", "RECOVERING"))
    answers = call_replicas(app, name, live) if num_running else []
    num_confirmed = sum(answer == digest(live) for answer in answers)
    for answer in answers:
        if isinstance(cause := getattr(answer, "cause", None), ConfigError):
            raise ConfigError(f"{name} refuses: {cause}")
    if num_confirmed < num_running:
        return f"{name} ({num_confirmed} of {num_running})"
    # Most of those that start have yet to look for stored values; a few may have looked before.
    # Seconds in which a replica that had already looked for stored values begins to serve, and can be called.
    is_settled = num_coming == 0 or time.monotonic() - began_s > 5.0
    return "" if is_settled else f"{name} ({num_coming} starting)"


def call_replicas(app: str, name: str, live: Values) -> Sequence[Any]:
    from ray import serve

    from specray.actors.client import SERVE_ERRORS

    response = serve.get_deployment_handle(name, app_name=app).broadcast("reload", live)
    try:
        return response.results(timeout_s=ASK_TIMEOUT_S, return_exceptions=True)
    except (TimeoutError, *SERVE_ERRORS):
        # Also of replicas that have just ended; the next round asks those that there are then.
        return ()
