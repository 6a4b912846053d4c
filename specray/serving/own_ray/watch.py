"""Watches whether the parts of Ray under a service answer: calls of Ray wait for a lost one for ever."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
SILENT_S: Final = 25.0
"""Seconds without an answer after which a server of Ray is lost. On a busy machine they take one or two."""
ANSWER_S: Final = 5.0
CONTROLLER_HUNG_S: Final = 15.0
"""Seconds without an answer after which Serve's controller is killed; Ray starts another."""
CONTROLLER_LOST_S: Final = 50.0
"""Seconds without an answer after which it does not come back. A start takes 10 s, on a busy machine 25."""
_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client of HTTP/2 begins: the preface, and no settings."""
_HEAD_BYTES: Final = 9
_SETTINGS: Final = 4


@dataclass(frozen=True, slots=True)
class RayPart:
    """One part of Ray.

    Args:
        name: as in the sentence about its loss.
        ask: returns once it has answered; may raise, or never return.
        lost_s: seconds without an answer after which it is lost.
        gone_s: the same when ``ask`` raises ConnectionRefusedError or FileNotFoundError.
        mend: may bring it back; called once, without waiting for it, after ``mend_s`` seconds.
    """

    name: str
    ask: Callable[[], object]
    lost_s: float = SILENT_S
    gone_s: float = SILENT_S
    mend: Callable[[], object] | None = None
    mend_s: float = CONTROLLER_HUNG_S


class Silence:
    """How long one part has been silent; counted in ticks, in which this process itself was awake.

    A part that has never answered is not judged: it may speak another protocol, such as TLS.
    """

    def __init__(self, part: RayPart) -> None:
        self._part = part
        self._has_answered = False
        self._is_gone = False
        self._is_mended = False
        self._silent_s = 0.0
        self._answers = 0
        self._seen = 0

    def answered(self) -> None:
        self._answers += 1
        self._is_gone = False

    def failed(self, error: Exception) -> None:
        self._is_gone = isinstance(error, (ConnectionRefusedError, FileNotFoundError))

    def tick(self, seconds: float) -> str | None:
        """Counts time; returns the sentence about the part's loss, or None."""
        if self._answers != self._seen:
            self._seen = self._answers
            self._has_answered, self._is_mended, self._silent_s = True, False, 0.0
            return None
        if not self._has_answered:
            return None
        part = self._part
        # Nothing is received while this process itself is stopped.
        self._silent_s += min(seconds, 2 * PERIOD_S)
        if self._silent_s >= (part.gone_s if self._is_gone else part.lost_s):
            how = "is gone" if self._is_gone else f"has not answered for {self._silent_s:.0f} s"
            return f"{part.name} {how}; the service cannot go on without it"
        if part.mend is not None and self._silent_s >= part.mend_s and not self._is_mended:
            self._is_mended = True
            logger.warning("%s has not answered for %.0f s and is started anew", part.name, self._silent_s)
            _in_background(part.mend)
        return None


@contextmanager
def watched(find: Callable[[], Sequence[RayPart]], on_lost: Callable[[str], None] | None) -> Iterator[None]:
    """Asks all parts every second while the block runs.

    Each part is asked in a thread of its own, which may hang for ever.

    Args:
        find: returns the parts; not called if nothing is watched.
        on_lost: gets the sentence about the first lost part, in another thread; None: nothing is watched.
    """
    if on_lost is None:
        yield
        return
    end = threading.Event()
    parts = find()
    silences = [Silence(part) for part in parts]
    for part, silence in zip(parts, silences, strict=True):
        _in_background(partial(_ask_for_ever, part, silence, end))
    _in_background(lambda: _judge(silences, end, on_lost))
    try:
        yield
    finally:
        end.set()


@contextmanager
def within(seconds: float, what: str, on_lost: Callable[[str], None] | None) -> Iterator[None]:
    """Calls ``on_lost``, as for :func:`watched`, with "``what`` within .. s" if the block takes longer."""
    timer = threading.Timer(seconds, on_lost or (lambda _: None), [f"{what} within {seconds:g} s"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _ask_for_ever(part: RayPart, silence: Silence, end: threading.Event) -> None:
    while not end.wait(PERIOD_S):
        try:
            part.ask()
        # Ray raises several kinds, also plain ones.
        except Exception as error:
            silence.failed(error)
        else:
            silence.answered()


def _judge(silences: Sequence[Silence], end: threading.Event, on_lost: Callable[[str], None]) -> None:
    before_s = time.monotonic()
    while not end.wait(PERIOD_S):
        now_s = time.monotonic()
        lost = [text for silence in silences if (text := silence.tick(now_s - before_s)) is not None]
        if lost:
            on_lost(lost[0])
            return
        before_s = now_s


def _in_background(work: Callable[[], object]) -> None:
    threading.Thread(target=work, name="specray-ray-watch", daemon=True).start()


def greet(host: str, port: int) -> None:
    """Returns once a gRPC server has begun an answer, for which it needs no token.

    Raises:
        OSError: it does not listen, or not in time.
        ConnectionError: it speaks something else.
    """
    with socket.create_connection((host, port), timeout=ANSWER_S) as connection:
        connection.sendall(_HELLO)
        head = b""
        while len(head) < _HEAD_BYTES:
            if not (more := connection.recv(_HEAD_BYTES - len(head))):
                raise ConnectionError("no HTTP/2 server")
            head += more
    if head[3] != _SETTINGS:
        raise ConnectionError("no HTTP/2 server")


def ray_parts(context: Any, *, is_own: bool) -> list[RayPart]:
    """Returns the parts of the Ray that ``ray.init`` has started or joined, as seen from this node.

    Args:
        context: what ``ray.init`` returned.
        is_own: True if this process has started it, so that what is gone does not come back.
    """
    import ray

    info = context.address_info
    # Where nobody listens any more, in a Ray of our own, whose servers do not come back.
    gone_s = 4.0 if is_own else SILENT_S
    host, _, port = info["gcs_address"].rpartition(":")
    node = next(node for node in ray.nodes() if node["NodeID"] == info["node_id"])
    raylet = str(node["NodeManagerAddress"]), int(node["NodeManagerPort"])
    parts = [
        RayPart("Ray's GCS", lambda: greet(host.strip("[]"), int(port)), gone_s=gone_s),
        RayPart("Ray's raylet", lambda: greet(*raylet), gone_s=gone_s),
    ]
    for name in ("raylet_socket_name", "object_store_address"):
        path = Path(info[name])
        parts.append(RayPart(f"Ray's socket {path}", path.stat, gone_s=gone_s))
    return parts


def serve_parts() -> list[RayPart]:
    """Returns Serve's controller: without it nothing that ends is replaced."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    return [
        RayPart(
            "Serve's controller",
            lambda: ray.get(controller.check_alive.remote(), timeout=ANSWER_S),
            lost_s=CONTROLLER_LOST_S,
            gone_s=CONTROLLER_LOST_S,
            mend=lambda: ray.kill(controller, no_restart=False),
        )
    ]
