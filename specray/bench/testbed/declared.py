"""Deploys an application as ``serve deploy`` does, so that a deployment can change while it runs."""

from __future__ import annotations

import threading
from typing import Any

from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from specray.config import Config
from specray.errors import EngineLostError, SpecrayError
from specray.serving.launch import APP_NAME, SERVE_LOGS, wait_running


class Declaration:
    """The service's entry in a configuration of Serve's."""

    def __init__(self) -> None:
        self._config: Config | None = None

    def deploy(self, config: Config) -> None:
        """Deploys the application; returns before it is ready."""
        self._config = config
        self._declare({})

    def upgrade(self, model: str) -> None:
        """Gives every replica of the draft another model, one after the other; the rest stays as it is.

        Args:
            model: path or hub id.

        Raises:
            EngineLostError: a draft could not be loaded, or not in time.
        """
        self._declare({"model": model})
        try:
            wait_running(threading.Event(), timeout_s=50.0)
        except SpecrayError as error:
            raise EngineLostError(f"the draft did not become {model}: {error}") from None

    def _declare(self, draft: dict[str, Any]) -> None:
        assert self._config is not None, "what was deployed can be upgraded"
        application: dict[str, Any] = {
            "name": APP_NAME,
            "route_prefix": "/",
            "import_path": "specray.serving.app:build_app",
            # With other arguments than before, all deployments would be replaced.
            "args": self._config.model_dump(mode="json"),
            "logging_config": SERVE_LOGS,
        }
        if draft:
            application["deployments"] = [{"name": "Draft", "user_config": {"draft": draft}}]
        # As `serve deploy` does, but without Ray's dashboard, which that needs.
        client: Any = _get_global_client()
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
