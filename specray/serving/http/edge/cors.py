"""Lets web pages of other origins call the API, where the configuration names them."""

from __future__ import annotations

from typing import Final

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from specray.config import HttpConfig
from specray.serving.http.observe import REQUEST_ID_HEADER
from specray.serving.http.openai_api import LEFT_OUT_HEADER

_MAX_AGE_S: Final = 600
"""Seconds for which a browser may keep the answer to a preflight."""
_READABLE: Final = (REQUEST_ID_HEADER, LEFT_OUT_HEADER, "Retry-After", "Retry-After-Ms")
"""Headers of answers that a page may read beside the common ones."""


def add_cors(app: Starlette, config: HttpConfig) -> None:
    """Adds the middleware, around all that may answer with an error; nothing without origins.

    Keys travel in ``Authorization``, which a page sets itself: no cookies are used, so none are allowed.
    """
    if not config.cors_origins:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.cors_origins,
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=_READABLE,
        max_age=_MAX_AGE_S,
    )
