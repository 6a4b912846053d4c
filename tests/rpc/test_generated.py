"""The committed stubs match the protos."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "specray" / "rpc" / "pb"


def test_regenerating_gives_the_committed_stubs(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "protos" / "generate.py"), str(tmp_path)], check=True, timeout=60
    )
    generated = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in COMMITTED.glob("*.py*") if path.is_file()}
    assert generated == committed


def test_generated_code_imports_nothing_outside_its_package() -> None:
    for path in COMMITTED.glob("*_pb2*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(("import specray", "from specray")):
                assert line.startswith("from specray.rpc.pb import "), f"{path.name}: {line}"
