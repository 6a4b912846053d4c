"""Finds why a deployment did not start in what Serve says of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specray.errors import ConfigError


def root_cause(messages: Sequence[str]) -> str:
    """Finds the cause in Serve's messages, which hold the tracebacks of every process on the way.

    Each traceback of one of our errors ends with its class and text; a ConfigError says most. Without any of
    them it is the last line. Serve's controller logs all of it.
    """
    text = "\n".join(filter(None, messages))
    errors = re.findall(r"^specray\.errors\.(\w+): (.+)$", text, re.MULTILINE)
    for name, message in errors:
        if name == ConfigError.__name__:
            return str(message)
    if errors:
        return str(errors[-1][1])
    return text.strip().splitlines()[-1] if text.strip() else "Serve does not say why"
