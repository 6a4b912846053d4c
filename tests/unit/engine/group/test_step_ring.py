"""Messages in shared memory arrive whole and in order, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from specray.engine.group import step_ring
from specray.engine.group.step_ring import NUM_SLOTS, SLOT_LEN, StepRing

ROOM = SLOT_LEN - 2


def make_ring(num_readers: int = 1) -> tuple[StepRing, list[StepRing]]:
    writer, path, token = StepRing.create(num_readers)
    try:
        readers = [StepRing.attach(path, token, num_readers, index) for index in range(num_readers)]
    finally:
        Path(path).unlink()
    return writer, readers


@pytest.mark.parametrize("length", [0, 1, ROOM - 1, ROOM, ROOM + 1, 2 * ROOM, 5 * ROOM + 3])
def test_messages_of_every_length_arrive(length: int) -> None:
    writer, readers = make_ring(2)
    messages = [[index * 7 - 3 for index in range(length)], [-(1 << 63), (1 << 63) - 1], []]
    for message in messages:
        writer.write(message, 1.0)
    for reader in readers:
        assert [reader.read(1.0) for _ in messages] == messages


def test_a_ring_goes_round_many_times() -> None:
    writer, [reader] = make_ring()
    for index in range(3 * NUM_SLOTS + 5):
        writer.write([index] * (index % 5), 1.0)
        assert reader.read(1.0) == [index] * (index % 5)


def test_a_message_longer_than_the_ring_passes_while_it_is_read() -> None:
    writer, [reader] = make_ring()
    message = list(range(NUM_SLOTS * ROOM + 2 * ROOM))
    read: list[list[int]] = []
    thread = threading.Thread(target=lambda: read.append(reader.read(10.0)))
    thread.start()
    writer.write(message, 10.0)
    thread.join(10.0)
    assert read == [message]


def test_a_reader_waits_no_longer_than_it_is_told() -> None:
    _, [reader] = make_ring()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"nothing came for 0\.1 s"):
        reader.read(0.1)
    assert time.monotonic() - began >= 0.1


def test_a_writer_is_a_ring_ahead_of_the_slowest_reader_at_most() -> None:
    writer, [fast, slow] = make_ring(2)
    for index in range(NUM_SLOTS):
        writer.write([index], 1.0)
        assert fast.read(1.0) == [index]
    with pytest.raises(TimeoutError):
        writer.write([NUM_SLOTS], 0.05)
    assert slow.read(1.0) == [0]
    writer.write([NUM_SLOTS], 1.0)
    assert fast.read(1.0) == [NUM_SLOTS]
    assert [slow.read(1.0) for _ in range(NUM_SLOTS)] == [[1 + index] for index in range(NUM_SLOTS)]


def test_a_reader_that_sleeps_wakes_up() -> None:
    writer, [reader] = make_ring()
    timer = threading.Timer(3 * step_ring.LOOKS_S, lambda: writer.write([5], 1.0))
    timer.start()
    assert reader.read(10.0) == [5]
    timer.join(10.0)


def test_the_ring_of_another_node_is_none(tmp_path: Path) -> None:
    """Nothing lies at the path there, or something else."""
    with pytest.raises(OSError, match="No such file"):
        StepRing.attach(str(tmp_path / "nothing"), 1, 1, 0)
    other = tmp_path / "other"
    other.write_bytes(b"x" * 100)
    with pytest.raises(OSError, match="is no ring"):
        StepRing.attach(str(other), 1, 1, 0)
    _, path, token = StepRing.create(1)
    try:
        with pytest.raises(OSError, match="is the ring of others"):
            StepRing.attach(path, token + 1, 1, 0)
    finally:
        Path(path).unlink()
