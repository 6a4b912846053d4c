"""The layers of the package, enforced by parsing imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "specray"

# Layer -> layers of specray that it may import. A layer may always import itself.
VOCABULARY = {"types", "requests", "errors"}
SEAMS = VOCABULARY | {"interfaces", "config", "environment", "sections", "metrics"}
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "requests": {"types"},
    "errors": set(),
    "sections": set(),
    "config": VOCABULARY | {"sections"},
    "environment": VOCABULARY | {"sections"},
    "interfaces": VOCABULARY,
    "counts": set(),
    "metrics": VOCABULARY | {"interfaces", "counts"},
    "telemetry": SEAMS,
    "fakes": SEAMS,
    "tokenization": SEAMS | {"demo"},
    "demo": VOCABULARY,
    "engine": SEAMS - {"requests"} | {"demo"},
    "drafting": SEAMS,
    "rpc": SEAMS,
    "control": VOCABULARY | {"config"},
    "router": SEAMS | {"control", "drafting"},
    "planning": SEAMS | {"control", "router", "fakes"},
    "actors": SEAMS | {"engine", "rpc", "router", "drafting", "tokenization", "demo", "telemetry"},
    "serving": SEAMS | {"engine", "rpc", "router", "drafting", "tokenization", "demo", "actors", "telemetry"},
    "bench": SEAMS
    | {
        "control",
        "engine",
        "rpc",
        "router",
        "drafting",
        "tokenization",
        "demo",
        "fakes",
        "actors",
        "serving",
        "planning",
    },
    "cli": SEAMS
    | {
        "engine",
        "rpc",
        "router",
        "drafting",
        "tokenization",
        "demo",
        "actors",
        "serving",
        "bench",
        "planning",
        "telemetry",
    },
    "__init__": set(),
}

# Third-party packages that only these layers may import.
OWNERS: dict[str, set[str]] = {
    "grpc": {"rpc"},
    "grpc_health": {"rpc"},
    "google": {"rpc"},
    "ray": {"actors", "serving", "bench"},
    "torch": {"engine", "demo", "bench"},
    "numba": {"engine"},
    "llvmlite": {"engine"},
    "triton": {"engine"},
    "transformers": {"engine", "demo", "tokenization", "bench"},
    "fastapi": {"serving"},
    "starlette": {"serving"},
    "typer": {"cli"},
    "prometheus_client": {"counts", "metrics", "serving"},
    "opentelemetry": {"telemetry"},
}


def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "pb" not in path.relative_to(PACKAGE).parts)


def _layer(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield module
            if module == "specray":
                yield from (f"specray.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_layers_below_it(path: Path) -> None:
    layer = _layer(path)
    assert layer in ALLOWED, f"{layer} is no known layer: add it to the contract on purpose"
    for name in _imports(path):
        top, _, rest = name.partition(".")
        if top == "specray":
            other = rest.split(".")[0]
            is_own = other in {"", "__version__", layer}
            assert is_own or other in ALLOWED[layer], f"{layer} must not import specray.{other}"
        elif top in OWNERS:
            assert layer in OWNERS[top], f"{layer} must not import {top}"


def test_contract_sees_a_forbidden_import(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from specray import engine\nimport torch.nn\n", encoding="utf-8")
    assert list(_imports(bad)) == ["specray", "specray.engine", "torch.nn"]
