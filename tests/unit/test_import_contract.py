"""The layout of the package, enforced by parsing imports: layers, floors, no circles, small folders."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "specray"
MAX_FILES_IN_FOLDER = 16

# Layer -> layers of specray that it may import. A layer may always import itself.
VOCABULARY = {
    "draft_tokens",
    "feature_rows",
    "engine_info",
    "types",
    "round_reports",
    "request_options",
    "requests",
    "errors",
    "json_files",
    "prefix_keys",
    "checkpoint_digest",
    "adapter_folders",
    "adapter_slots",
}
SEAMS = VOCABULARY | {"interfaces", "config", "environment", "telemetry", "gguf"}
SERVICE = {"engine", "rpc", "router", "routing", "drafting", "grammar", "tokenization", "demo"}
ALLOWED: dict[str, set[str]] = {
    "draft_tokens": set(),
    "feature_rows": set(),
    "engine_info": set(),
    "types": {"draft_tokens", "feature_rows"},
    "round_reports": set(),
    "request_options": {"types"},
    "requests": {"types", "round_reports", "prefix_keys"},
    "errors": set(),
    "json_files": {"errors"},
    "prefix_keys": set(),
    "checkpoint_digest": {"errors"},
    "adapter_folders": {"errors"},
    "adapter_slots": {"errors"},
    "gguf": {"errors"},
    "config": VOCABULARY,
    "environment": VOCABULARY | {"config"},
    "interfaces": VOCABULARY,
    "telemetry": VOCABULARY | {"interfaces", "config", "environment"},
    "fakes": SEAMS,
    "tokenization": SEAMS | {"demo"},
    "demo": VOCABULARY,
    "grammar": VOCABULARY,
    "train": VOCABULARY | {"gguf"},
    "models": VOCABULARY | {"environment", "gguf", "demo", "tokenization"},
    "engine": SEAMS - {"requests", "request_options"} | {"demo", "tokenization", "grammar", "drafting"},
    "drafting": SEAMS,
    "control": VOCABULARY | {"config"},
    "rpc": SEAMS,
    "router": SEAMS | {"control", "drafting"},
    "routing": SEAMS,
    "loading": VOCABULARY | {"config", "demo"},
    "planning": SEAMS | {"control", "router", "routing", "loading", "fakes"},
    "actors": SEAMS | SERVICE | {"loading"},
    "serving": SEAMS | SERVICE | {"actors", "loading"},
    "bench": SEAMS | SERVICE | {"control", "fakes", "actors", "serving", "planning", "train"},
    "cli": SEAMS | SERVICE | {"models", "actors", "serving", "bench", "planning", "train"},
    "__init__": set(),
}

# Floors of a folder's rooms, the lowest first. A room is a folder or a loose module; it imports itself, rooms
# of lower floors, and rooms of its own floor that stand before it.
FLOORS: dict[str, list[list[str]]] = {
    "engine": [
        ["activation", "device", "visibility", "weights", "window"],
        ["inputs", "step"],
        ["cpu", "cuda", "group"],
        ["sampling"],
        ["cache"],
        ["attention", "schedule"],
        ["model", "base"],
        ["preflight", "runner"],
        ["drafting"],
        ["draft_view", "features"],
        ["target"],
        ["profile", "build"],
        ["__init__"],
    ],
    "router": [
        ["settings", "deferred", "first_tokens"],
        ["session", "transport"],
        ["output"],
        ["trace", "observer"],
        ["proposers"],
        ["live_session"],
        ["admission"],
        ["draft_model", "intake"],
        ["fallback", "choice", "scheduler"],
        ["in_flight", "rounds"],
        ["loops", "readiness"],
        ["router"],
        ["__init__"],
    ],
    "serving": [
        [
            "validation",
            "generation",
            "metrics",
            "readiness",
            "ports",
            "gc_schedule",
            "adapters",
            "own_ray",
        ],
        ["local", "problems", "admission", "tools"],
        ["observe", "calls", "warmup"],
        ["models"],
        ["http", "grpc"],
        ["behind"],
        ["ingress", "app"],
        ["launch", "reload"],
        ["__init__"],
    ],
    "serving/http": [
        ["edge", "extras", "identity", "events", "responses"],
        ["schemas", "server", "unknown"],
        ["chat", "answers"],
        ["openai_api"],
        ["messages_api", "responses_api"],
        ["routes"],
        ["shell"],
        ["app", "several", "__init__"],
    ],
}

# Third-party packages that only these layers may import.
OWNERS: dict[str, set[str]] = {
    "grpc": {"rpc"},
    "grpc_health": {"rpc"},
    "google": {"rpc"},
    "ray": {"actors", "serving", "bench"},
    "torch": {"engine", "train", "bench", "models"},
    "numba": {"engine"},
    "llguidance": {"grammar"},
    "llvmlite": {"engine"},
    "triton": {"engine"},
    "transformers": {"engine", "train", "tokenization", "bench", "models"},
    "gguf": {"gguf", "models"},
    "fastapi": {"serving"},
    "starlette": {"serving"},
    "typer": {"cli", "bench"},
    "prometheus_client": {"telemetry", "serving"},
    "opentelemetry": {"telemetry"},
}


@functools.cache
def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "pb" not in path.relative_to(PACKAGE).parts)


def _layer(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield module
            if module == "specray":
                yield from (f"specray.{alias.name}" for alias in node.names)


def _forbidden(layer: str, path: Path) -> list[str]:
    """Imports of a module of the layer that are not allowed there."""
    found = []
    for name in _imports(path):
        top, _, rest = name.partition(".")
        if top == "specray":
            other = rest.split(".")[0]
            if other not in {"", "__version__", layer} and other not in ALLOWED[layer]:
                found.append(f"{path}: {layer} must not import specray.{other}")
        elif top in OWNERS and layer not in OWNERS[top]:
            found.append(f"{path}: {layer} must not import {top}")
    return found


@pytest.mark.parametrize("layer", sorted({_layer(path) for path in _modules()}))
def test_modules_import_only_layers_below_them(layer: str) -> None:
    assert layer in ALLOWED, f"{layer} is no known layer: add it to the contract on purpose"
    assert [each for path in _modules() if _layer(path) == layer for each in _forbidden(layer, path)] == []


def test_contract_sees_a_forbidden_import(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from specray import engine\nimport torch.nn\n", encoding="utf-8")
    assert list(_imports(bad)) == ["specray", "specray.engine", "torch.nn"]
    assert _forbidden("router", bad) == [
        f"{bad}: router must not import specray.engine",
        f"{bad}: router must not import torch",
    ]
    assert _forbidden("bench", bad) == []


def _upward(folder: str, files: Mapping[str, Path]) -> list[str]:
    """Imports of a folder's module that lead to a higher floor, or to none."""
    rooms = {room: number for number, room in enumerate(room for floor in FLOORS[folder] for room in floor)}
    own = f"specray.{folder.replace('/', '.')}"

    def room_of(module: str) -> str:
        parts = module.removeprefix(own).strip(".").split(".")
        return parts[0] or "__init__"

    return [
        f"{module}: {room_of(name)} is not below {room_of(module)}"
        for module, path in files.items()
        for name in _imports(path)
        if f"{name}.".startswith(f"{own}.") and rooms[room_of(name)] > rooms[room_of(module)]
    ]


@pytest.mark.parametrize("folder", FLOORS)
def test_rooms_import_only_rooms_below_them(folder: str) -> None:
    files = [path for path in _modules() if path.is_relative_to(PACKAGE / folder)]
    assert _upward(folder, _named(files, REPOSITORY)) == []


def test_an_import_upwards_is_found(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from specray.router.settings import x\nfrom specray.router.rounds import y\n", encoding="utf-8"
    )
    assert _upward("router", {"specray.router.session.bad": bad}) == [
        "specray.router.session.bad: rounds is not below session"
    ]


def _run_by_import(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that run when the module is imported: not those in functions or for type checkers."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    is_for_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    children: Iterable[ast.AST] = node.orelse if is_for_types else ast.iter_child_nodes(node)
    for child in children:
        yield from _run_by_import(child)


def _import_graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """By module name: the modules that its import runs, the ``__init__`` of packages around them included."""
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        found: set[str] = set()
        for node in _run_by_import(_parsed(path)):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
                continue
            for alias in node.names:
                child = f"{node.module}.{alias.name}"
                found.add(child if child in files else node.module or "")
        # A package around both files is being imported already.
        outer = {".".join(parts[:end]) for parts in map(_parts, found) for end in range(1, len(parts))}
        found |= {package for package in outer if not name.startswith(f"{package}.")}
        graph[name] = {module for module in found if module in files and module != name}
    return graph


def _parts(module: str) -> list[str]:
    return module.split(".")


def _circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules each of which imports the next one, the last of them the first again; empty: there is none."""
    path: list[str] = []
    finished: set[str] = set()

    def visit(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        path.append(module)
        for other in sorted(graph[module]):
            if circle := visit(other):
                return circle
        finished.add(path.pop())
        return []

    return next((circle for module in sorted(graph) if (circle := visit(module))), [])


def _named(files: Iterable[Path], root: Path) -> dict[str, Path]:
    """The files by module name."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files
    }


@pytest.mark.slow
def test_no_file_imports_itself_through_others() -> None:
    circle = _circle(_import_graph(_named(_modules(), REPOSITORY)))
    assert not circle, "import circle: " + " -> ".join(circle)


CIRCLES = {
    "direct": ({"a": "import p.b", "b": "from p import a"}, ["p.a", "p.b", "p.a"]),
    "long": (
        {"a": "from p.b import x", "b": "try:\n    from p.c import x\nfinally:\n    pass", "c": "import p.a"},
        ["p.a", "p.b", "p.c", "p.a"],
    ),
    "through a package": (
        {"a": "from p.q.b import x", "q.__init__": "from p.a import x", "q.b": "x = 1"},
        ["p.a", "p.q", "p.a"],
    ),
    "for types only": ({"a": "import p.b", "b": "if typing.TYPE_CHECKING:\n    import p.a"}, []),
    "in a function": ({"a": "import p.b", "b": "def f():\n    import p.a"}, []),
    "none": ({"a": "import p.b, p.c", "b": "from p.c import x", "c": "import json"}, []),
}


@pytest.mark.parametrize("name", CIRCLES)
def test_circles_are_found(name: str, tmp_path: Path) -> None:
    sources, expected = CIRCLES[name]
    for module, source in {"__init__": "", **sources}.items():
        path = (tmp_path / "p").joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
    assert _circle(_import_graph(_named(tmp_path.rglob("*.py"), tmp_path))) == expected


def _crowded(folders: Iterable[Path]) -> list[str]:
    """Folders, however deep, that hold more Python files than a reader takes in at once."""
    numbers = Counter(path.parent for folder in folders for path in folder.rglob("*.py"))
    return sorted(f"{folder}: {number}" for folder, number in numbers.items() if number > MAX_FILES_IN_FOLDER)


def test_no_folder_holds_more_than_sixteen_files() -> None:
    assert _crowded([PACKAGE, REPOSITORY / "tests"]) == []


def test_crowded_folders_are_found(tmp_path: Path) -> None:
    for folder, number in (("full", 16), ("crowded", 17)):
        (tmp_path / "in" / folder).mkdir(parents=True)
        for index in range(number):
            (tmp_path / "in" / folder / f"f{index}.py").touch()
    assert _crowded([tmp_path]) == [f"{tmp_path / 'in' / 'crowded'}: 17"]
