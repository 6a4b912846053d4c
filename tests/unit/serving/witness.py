"""An observer of an Ingress's calls for tests, which tells what was observed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specray.config import parse_config
from specray.serving.observe import CallObserver
from specray.telemetry.logs import extra_fields
from specray.telemetry.tracing import Tracing
from tests.unit.serving.http.service import MODEL, wait_until

PROMPT = "hello"
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CONFIG = parse_config({"served_model_name": MODEL})


class Witness:
    """An observer that records lines, counters and spans; its clock moves a second with every reading."""

    def __init__(self, caplog: pytest.LogCaptureFixture, *, is_traced: bool = False) -> None:
        caplog.set_level(logging.DEBUG, logger="specray.serving")
        self._caplog = caplog
        self._now = 0.0
        self.spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        tracing = Tracing(provider) if is_traced else None
        self.observer = CallObserver(CONFIG.logging, tracing=tracing, now=self._tick)

    def _tick(self) -> float:
        self._now += 1.0
        return self._now

    def lines(self) -> list[logging.LogRecord]:
        return [record for record in self._caplog.records if record.name == "specray.serving.observe"]

    def line(self) -> dict[str, Any]:
        """Returns message, level and fields of the only line."""
        (record,) = self.lines()
        return {"message": record.getMessage(), "level": record.levelname} | extra_fields(record)

    async def ended(self, num_calls: int = 1) -> None:
        """Waits until the records of this many calls have ended, which may be after their answers."""
        await wait_until(lambda: len(self.lines()) >= num_calls)


def conventional(span: ReadableSpan) -> dict[str, Any]:
    """The attributes that semantic conventions name."""
    attributes = dict(span.attributes or {})
    return {name: value for name, value in attributes.items() if not name.startswith("specray.")}
