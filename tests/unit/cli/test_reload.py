"""Tests of the command line of `specray reload`: which configuration it asks for, and what it prints."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specray.cli.app import run
from specray.config import Config, parse_config
from specray.config.live import KeyChange, changes, check_live
from specray.errors import ConfigError
from specray.serving import reload as reload_module

SERVED = parse_config(
    {
        "http": {"server": "ingress", "port": 8123},
        "speculation": {"num_speculative_tokens": 4},
        "router": {"max_queued_requests": 5},
    }
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Ports that were asked for; the service behind them serves SERVED."""
    ports: list[int | None] = []

    def reload_service(
        wanted: Callable[[dict[str, Any]], Config], *, port: int | None, timeout_s: float
    ) -> list[KeyChange]:
        ports.append(port)
        served = SERVED.model_dump(mode="json")
        new = wanted(served)
        # What is served is compared afterwards.
        assert parse_config(served) == SERVED
        found = changes(SERVED, new)
        check_live(found)
        return found

    monkeypatch.setattr(reload_module, "reload_service", reload_service)
    return ports


def test_without_a_file_only_what_is_set_changes(
    asked: list[int | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(["reload", "--set", "speculation.num_speculative_tokens=2", "--set", "logging.level=DEBUG"]) == 0
    )
    assert capsys.readouterr().out.splitlines() == [
        "speculation.num_speculative_tokens: 4 -> 2",
        'logging.level: null -> "DEBUG"',
    ]
    assert asked == [None]


def test_a_file_is_the_whole_configuration_and_names_the_port(
    asked: list[int | None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "target: {model: embedded}\nhttp: {port: 8123}\nspeculation: {num_speculative_tokens: 4}\n"
    )
    assert run(["reload", str(path)]) == 0
    assert capsys.readouterr().out == "router.max_queued_requests: 5 -> 256\n"
    assert asked == [8123]
    assert run(["reload", str(path), "--set", "router.max_queued_requests=5", "--port", "8124"]) == 0
    assert capsys.readouterr().out == "specray: nothing differs from what is served\n"
    assert asked == [8123, 8124]


KEYS = [{"name": "team-a", "sha256": "0" * 64}, {"name": "team-b", "sha256": "1" * 64}]
OPENED = "auth.keys: team-a (00000000), team-b (11111111) -> none\n"
STAY = "auth.keys: team-a, team-b stay in force: {path} does not name it; `auth: {{keys: []}}` ends them\n"
NOTHING = "specray: nothing differs from what is served\n"
OPEN = "auth.keys: the service is open now: whoever reaches it may call\n"


@pytest.mark.parametrize(
    ("auth", "said"),
    [
        ("", STAY + NOTHING),
        ("auth: {}", STAY + NOTHING),
        (
            "auth: {open_paths: [/version]}",
            STAY + 'auth.open_paths: [] -> ["/version"]\n',
        ),
        ("auth: {keys: []}", OPENED + OPEN),
        (
            f"auth: {{keys: [{{name: team-b, sha256: '{'1' * 64}'}}]}}",
            "auth.keys: team-a (00000000), team-b (11111111) -> team-b (11111111)\n",
        ),
    ],
)
def test_a_file_without_keys_does_not_open_a_service_that_has_some(
    asked: list[int | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    auth: str,
    said: str,
) -> None:
    values = {**SERVED.model_dump(mode="json", exclude={"router"}), "auth": {"keys": KEYS}}
    monkeypatch.setitem(globals(), "SERVED", parse_config(values))
    path = tmp_path / "config.yaml"
    path.write_text(
        "target: {model: embedded}\nhttp: {port: 8123}\nspeculation: {num_speculative_tokens: 4}\n" + auth
    )
    assert run(["reload", str(path)]) == 0
    assert capsys.readouterr().out == said.format(path=path)


def test_keys_that_are_set_to_none_open_a_service_with_a_word(
    asked: list[int | None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {**SERVED.model_dump(mode="json"), "auth": {"keys": KEYS}}
    monkeypatch.setitem(globals(), "SERVED", parse_config(values))
    assert run(["reload", "--set", "auth.keys=[]"]) == 0
    assert capsys.readouterr().out == OPENED + OPEN


def test_a_refusal_is_one_line_and_exit_code_2(
    asked: list[int | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["reload", "--set", "target.max_num_seqs=3", "--set", "router.max_queued_requests=6"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "specray: target.max_num_seqs: 64 -> 3 (the target is loaded and placed by it); "
        "this changes only with a new start of the service\n"
    )
    assert run(["reload", "--set", "router.max_queued_requests=-1"]) == 2
    assert "router.max_queued_requests: Input should be greater than or equal to 0" in capsys.readouterr().err


def test_the_answers_of_replicas_are_counted_until_all_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    _, live = reload_module.split(SERVED)
    good = reload_module.digest(live)
    states: dict[str, int] = {}
    answers: list[Any] = []

    class Status:
        replica_states = states

    class Overview:
        deployments = {"Router": Status}  # noqa: RUF012

    class Serve:
        applications = {reload_module.APP_NAME: Overview}  # noqa: RUF012

    monkeypatch.setattr("ray.serve.status", lambda: Serve)
    monkeypatch.setattr(reload_module, "call_replicas", lambda app, name, values: answers)

    def missing(*, began_s: float = float("inf")) -> str:
        return reload_module.not_confirmed(reload_module.APP_NAME, "Router", live, began_s)

    states |= {"RUNNING": 2}
    answers += [good, "another"]
    assert missing() == "Router (1 of 2)"
    answers[:] = [good, good]
    assert missing() == ""
    states |= {"STARTING": 1}
    assert missing() == "Router (1 starting)"
    # One that starts so long afterwards has found the stored values.
    assert missing(began_s=float("-inf")) == ""
    error = ConfigError("no such value")
    answers[:] = [good, type("Failed", (), {"cause": error})()]
    with pytest.raises(ConfigError, match="Router refuses: no such value"):
        missing()


HANGING = """
import sys, threading
from specray.cli import reload
from specray.cli.app import run
from specray.serving import reload as service

reload.CONNECT_S = -0.9
service.reload_service = lambda *_, **options: threading.Event().wait()
run(["reload", "--timeout", "1"])
"""


def test_a_ray_that_never_answers_ends_the_command_with_a_sentence() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=120)
    said = "specray: the Ray of the service has not answered within 0.1 s; what has changed is not known\n"
    assert (done.returncode, done.stderr[-len(said) :]) == (1, said)
