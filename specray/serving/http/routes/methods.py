"""Methods of endpoints that only read."""

from __future__ import annotations

from typing import Final

GET: Final = ["GET", "HEAD"]
"""HEAD wherever GET is: probes use it. The server sends no body then."""
