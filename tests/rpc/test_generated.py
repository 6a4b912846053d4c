"""The committed stubs match the protos, and whoever installs the package has the protos, too."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from specray.rpc import PROTO_PATH

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "specray" / "rpc" / "pb"


def files_of(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    paths = (path for path in folder.rglob(pattern) if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_regenerating_gives_the_committed_stubs(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "protos" / "generate.py"), str(tmp_path)], check=True, timeout=60
    )
    committed = files_of(COMMITTED)
    assert files_of(tmp_path) == committed
    protos = {f"protos/{name}": data for name, data in files_of(ROOT / "protos", "*.proto").items()}
    assert protos == {name: data for name, data in committed.items() if name.endswith(".proto")}


def test_an_installed_package_has_every_proto() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    (pattern,) = packaged["package-data"]["specray.rpc.pb"]
    assert sorted(COMMITTED.glob(pattern)) == sorted(COMMITTED.rglob("*.proto"))
    assert Path(PROTO_PATH, "specray", "v1", "inference.proto").is_file()


def test_generated_code_imports_nothing_outside_its_package() -> None:
    for path in COMMITTED.glob("*_pb2*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(("import specray", "from specray")):
                assert line.startswith("from specray.rpc.pb import "), f"{path.name}: {line}"
