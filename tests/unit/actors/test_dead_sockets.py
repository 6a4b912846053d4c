"""Sockets that killed processes leave go; those on which somebody listens, or soon will, stay."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from specray.actors.node import remove_dead_sockets


def bound(path: Path, *, age_s: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    before = path.stat().st_mtime - age_s
    os.utime(path, (before, before))
    return made


def test_only_old_sockets_without_a_listener_go(tmp_path: Path) -> None:
    bound(tmp_path / "dead.sock", age_s=61).close()
    bound(tmp_path / "new.sock", age_s=30).close()
    (tmp_path / "file.txt").touch()
    with bound(tmp_path / "alive.sock", age_s=61) as alive:
        alive.listen()
        remove_dead_sockets(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["alive.sock", "file.txt", "new.sock"]
