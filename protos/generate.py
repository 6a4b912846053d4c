"""Generates ``specray/rpc/pb`` from the protos; run by ``make protos``, and gives the same bytes every time.

protoc names modules after the proto's path (``specray.v1.draft_pb2``), which is the wire's name and must not
change; the Python modules live in ``specray.rpc.pb``. So imports and module names are rewritten here. The
protos are copied beside them, so that they are part of an installed package.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
OUTPUT = PROTOS.parent / "specray" / "rpc" / "pb"
INIT = '"""Generated from the protos by ``make protos``: not edited by hand."""\n'
REWRITES = (
    (re.compile(r"^from specray\.v1 import ", re.MULTILINE), "from specray.rpc.pb import "),
    (re.compile(r"'specray\.v1\.(\w+_pb2)'"), r"'specray.rpc.pb.\1'"),
)


def generate(output: Path) -> None:
    """Writes stubs and copies of every proto into ``output`` and removes what is no longer generated."""
    output.mkdir(parents=True, exist_ok=True)
    files = {"__init__.py": INIT}
    with tempfile.TemporaryDirectory() as scratch:
        _run_protoc(scratch)
        for path in Path(scratch).rglob("*.py*"):
            files[path.name] = _rewrite(path.read_text(encoding="utf-8"))
    for path in PROTOS.rglob("*.proto"):
        files[f"protos/{path.relative_to(PROTOS)}"] = path.read_text(encoding="utf-8")
    for path in (*output.glob("*.py*"), *output.rglob("*.proto")):
        if str(path.relative_to(output)) not in files:
            path.unlink()
    for name, text in sorted(files.items()):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(text, encoding="utf-8")


def _run_protoc(output: str) -> None:
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTOS}",
            f"--proto_path={well_known}",
            f"--python_out={output}",
            f"--pyi_out={output}",
            f"--grpc_python_out={output}",
            *sources,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")


def _rewrite(text: str) -> str:
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return text


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
