"""What a fetch says of itself: lines without a terminal, bars with one."""

from __future__ import annotations

import pytest

from specray.cli.models.fetching import BarListener, QuietListener


def test_without_a_terminal_the_first_work_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    listener = QuietListener()
    for done in range(3):
        listener.progress("fetching", done, 3)
    listener.progress("converting")
    listener.notice("terms apply")
    assert capsys.readouterr().err == "specray: fetching\nspecray: terms apply\n"


def test_bars_show_each_work_and_notices_between(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    listener = BarListener()
    listener.notice("before")
    listener.progress("fetching tiny", 0, 4_000_000)
    listener.progress("fetching tiny", 3_000_000, 4_000_000)
    listener.notice("[between]")
    listener.progress("converting tiny")
    listener.close()
    said = capsys.readouterr().err
    assert said.startswith("specray: before\n")
    assert "specray: fetching tiny" in said
    assert "3/4 MB" in said
    assert "specray: [between]" in said
    assert "specray: converting tiny" in said


def test_a_bar_tells_how_long_the_rest_takes_at_the_speed_of_what_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    clock = [0.0]
    listener = BarListener(lambda: clock[0])
    # What is there of an earlier fetch came at no speed.
    for clock[0], done in ((0.0, 500), (10.0, 510), (20.0, 520), (20.1, 520)):
        listener.progress("fetching tiny", done * 1_000_000, 1_000_000_000)
    listener.close()
    assert "8 min left" in capsys.readouterr().err
