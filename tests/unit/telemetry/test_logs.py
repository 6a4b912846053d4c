"""Log lines in text and JSON format."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from specray.config import LoggingConfig
from specray.errors import ConfigError
from specray.telemetry.logs import ROOT, configure_logging


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """The package's logger, restored after the test."""
    root = logging.getLogger(ROOT)
    before = (list(root.handlers), root.propagate, root.level)
    yield logging.getLogger("specray.tests")
    root.handlers[:], root.propagate = before[:2]
    root.setLevel(before[2])


def test_a_json_line_has_the_process_the_record_and_its_fields(logger: logging.Logger) -> None:
    out = io.StringIO()
    config = LoggingConfig(format="json")
    configure_logging(config, stream=out, context={"deployment": "Router", "replica": "abc"})
    logger.info("ended %s", "well", extra={"request_id": "cmpl-1", "ttft_ms": 1.5, "tenant": None})
    values = json.loads(out.getvalue())
    assert values.pop("time").endswith("+00:00")
    assert values == {
        "level": "INFO",
        "logger": "specray.tests",
        "message": "ended well",
        "deployment": "Router",
        "replica": "abc",
        "request_id": "cmpl-1",
        "ttft_ms": 1.5,
    }


def test_a_json_line_is_one_line_with_the_exception_in_it(logger: logging.Logger) -> None:
    out = io.StringIO()
    configure_logging(LoggingConfig(format="json"), stream=out)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("failed\nbadly")
    (line,) = out.getvalue().splitlines()
    values = json.loads(line)
    assert values["message"] == "failed\nbadly"
    assert values["exception"].startswith("Traceback") and values["exception"].endswith("two\nlines")


def test_a_text_line_ends_with_the_fields_quoted_where_needed(logger: logging.Logger) -> None:
    out = io.StringIO()
    configure_logging(LoggingConfig(), stream=out)
    fields = {
        "request_id": "cmpl-1",
        "duration_ms": 12.3456789,
        "error": 'a "b"',
        "empty": "",
        "line": "a\nb",
    }
    logger.warning("request", extra=fields)
    assert out.getvalue().endswith(
        "WARNING specray.tests: request request_id=cmpl-1 duration_ms=12.3457"
        ' error="a \\"b\\"" empty="" line="a\\nb"\n'
    )
    assert len(out.getvalue().splitlines()) == 1


def test_the_level_is_the_configured_one_then_the_environments(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECRAY_LOG_LEVEL", "ERROR")
    out = io.StringIO()
    configure_logging(LoggingConfig(), stream=out)
    logger.warning("not shown")
    configure_logging(LoggingConfig(level="DEBUG"), stream=out)
    logger.debug("shown once")
    assert out.getvalue().count("shown") == 1

    monkeypatch.setenv("SPECRAY_LOG_LEVEL", "LOUD")
    with pytest.raises(ConfigError, match="SPECRAY_LOG_LEVEL is 'LOUD'"):
        configure_logging(LoggingConfig())


def test_records_do_not_reach_the_handlers_of_others(logger: logging.Logger) -> None:
    theirs = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(theirs)
    try:
        configure_logging(LoggingConfig(), stream=io.StringIO())
        logger.error("ours")
    finally:
        logging.getLogger().removeHandler(theirs)
    assert theirs.stream.getvalue() == ""
