"""Tests of the watch over the parts of Ray: when a silent part is lost, and what is no silence."""

from __future__ import annotations

import socket
import threading
from concurrent import futures

import grpc
import pytest

from specray.serving.own_ray.watch import RayPart, Silence, greet, watched, within

DEADLINE_S = 30.0


def silence(**options: float) -> Silence:
    return Silence(RayPart("the raylet", lambda: None, **{"lost_s": 4.0, "gone_s": 2.0, **options}))


def ticks(one: Silence, number: int, seconds: float = 1.0) -> list[str | None]:
    return [one.tick(seconds) for _ in range(number)]


def test_a_part_is_lost_after_its_time_without_an_answer_and_sooner_when_nobody_listens() -> None:
    one = silence()
    one.answered()
    one.failed(TimeoutError())
    assert ticks(one, 5) == [None, None, None, None, "the raylet has not answered for 4 s; " + REST]
    one = silence()
    one.answered()
    one.failed(ConnectionRefusedError())
    assert ticks(one, 3) == [None, None, "the raylet is gone; " + REST]


REST = "the service cannot go on without it"


def test_an_answer_ends_a_silence_and_what_never_answered_is_not_judged() -> None:
    one = silence()
    one.failed(ConnectionRefusedError())
    assert ticks(one, 9) == [None] * 9
    for _ in range(3):
        one.answered()
        assert ticks(one, 4) == [None] * 4
        one.failed(FileNotFoundError())
    one.answered()
    assert ticks(one, 4) == [None] * 4


def test_the_time_in_which_the_watch_itself_was_stopped_counts_as_one_tick() -> None:
    one = silence()
    one.answered()
    assert one.tick(1.0) is None
    assert one.tick(3600.0) is None
    assert one.tick(1.0) is None
    assert one.tick(1.0) == "the raylet has not answered for 4 s; " + REST


def test_a_hung_part_is_mended_once_in_each_silence() -> None:
    mended = threading.Semaphore(0)
    one = Silence(RayPart("the controller", lambda: None, lost_s=4.0, mend=mended.release, mend_s=2.0))
    for _ in range(2):
        one.answered()
        assert ticks(one, 4) == [None] * 4
        assert mended.acquire(timeout=DEADLINE_S)
    assert not mended.acquire(blocking=False)
    assert one.tick(1.0) == "the controller has not answered for 4 s; " + REST


def test_a_part_that_hangs_and_one_that_fails_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.serving.own_ray.watch.PERIOD_S", 0.01)
    lost: list[str] = []
    is_said, end = threading.Event(), threading.Event()
    calls = {"GCS": 0, "raylet": 0}

    def say(reason: str) -> None:
        lost.append(reason)
        is_said.set()

    def hang() -> None:
        calls["raylet"] += 1
        if calls["raylet"] > 1:
            end.wait()

    parts = [RayPart("GCS", lambda: None), RayPart("raylet", hang, lost_s=0.1)]
    with watched(lambda: parts, say):
        assert is_said.wait(DEADLINE_S)
    end.set()
    assert lost == ["raylet has not answered for 0 s; " + REST]


def test_what_takes_too_long_is_said_while_it_still_runs() -> None:
    lost: list[str] = []
    is_said = threading.Event()

    def say(reason: str) -> None:
        lost.append(reason)
        is_said.set()

    with within(0.01, "Ray Serve did not start", say):
        assert is_said.wait(DEADLINE_S)
    with within(600.0, "Ray Serve did not start", say), within(0.0, "nobody watches", None):
        pass
    assert lost == ["Ray Serve did not start within 0.01 s"]


def test_a_grpc_server_greets_and_others_do_not() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    greet("127.0.0.1", port)
    server.stop(None).wait()
    with pytest.raises(ConnectionRefusedError):
        greet("127.0.0.1", port)


def test_a_server_that_accepts_and_says_nothing_has_not_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.serving.own_ray.watch.ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        greet(*silent.getsockname())


def test_another_protocol_is_no_greeting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="no HTTP/2 server"):
            greet(*other.getsockname())
        thread.join(DEADLINE_S)
