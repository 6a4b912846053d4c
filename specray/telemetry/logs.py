"""Logs of specray's own processes, as text or JSON on stderr. Ray keeps every actor's stderr in a file.

A record's ``extra`` becomes fields: ``logger.info("...", extra={"request_id": "cmpl-1"})``. Prompts, outputs
and keys are never logged, whatever the level.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from typing import Final, TextIO

from specray.config import LoggingConfig
from specray.environment import log_level

ROOT: Final = "specray"
"""Name of the parent of all loggers of the package."""
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure_logging(
    config: LoggingConfig, *, context: Mapping[str, str] | None = None, stream: TextIO | None = None
) -> logging.Handler:
    """Makes this process log to stderr in the configured format; replaces an earlier call's handler.

    Args:
        context: fields of every JSON line, such as ``deployment`` and ``replica``.
        stream: output instead of stderr.

    Raises:
        ConfigError: SPECRAY_LOG_LEVEL is not a level.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(context) if config.format == "json" else TextFormatter())
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(log_level(config))
    return handler


def extra_fields(record: logging.LogRecord) -> dict[str, object]:
    """Fields that the caller gave as ``extra``, without those that are None."""
    return {
        name: value
        for name, value in record.__dict__.items()
        if name not in _STANDARD and not name.startswith("_") and value is not None
    }


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the process's context, the record's fields."""

    def __init__(self, context: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._context = dict(context or {})

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        values: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._context,
            **extra_fields(record),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """Human-readable lines; the record's fields follow the message as ``name=value``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = (f" {name}={_shown(value)}" for name, value in extra_fields(record).items())
        return super().formatMessage(record) + "".join(fields)


def _shown(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    is_plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if is_plain else json.dumps(text, ensure_ascii=False)
