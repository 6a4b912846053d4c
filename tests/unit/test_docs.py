"""README and docs can be followed: commands, options, links, blocks of code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import textwrap
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from specray.cli import main
from specray.cli.app import command_line, run
from specray.cli.settings import build_config, pair_options
from specray.config import Config, parse_config
from specray.models.catalogue import DEFAULT_MODEL
from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.schemas import CompletionRequest, parse_request
from specray.serving.local import pair
from tests.unit.engine.processes import forked_worker

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
DOCUMENTS = [README, *sorted(DOCS.rglob("*.md"))]
MAX_README_LINES = 160

TOCTREE = "{toctree}"
LANGUAGES = {"", "bash", "python", "yaml", TOCTREE}
"""Languages of code blocks; a block without one is a picture, never a command."""
OTHER_PROGRAMS = {"cd", "cmake", "cp", "curl", "docker", "env", "helm", "kubectl", "llama-server", "pip"}
OTHER_PROGRAMS |= {"python", "python3", "rm", "sed", "tar"}
"""Programs that documents may call besides specray and make."""
QUICK_COMMANDS = ("generate", "keys new", "bench router", "bench rpc")
"""Commands of specray that need no service and take seconds: the first of each kind runs for real."""


class Block(typing.NamedTuple):
    """One fenced block of code."""

    path: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """Place of the block, for the ids of tests."""
        return f"{self.path.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Page:
    """One document, its code apart from its prose."""

    path: Path
    prose: str
    blocks: tuple[Block, ...]


@cache
def read_page(path: Path) -> Page:
    blocks: list[Block] = []
    prose: list[str] = []
    inside: list[str] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            if inside is None:
                blocks.append(Block(path, number, line.strip("` "), ""))
                inside = []
            else:
                blocks[-1] = blocks[-1]._replace(text=textwrap.dedent("\n".join(inside)))
                inside = None
        elif inside is not None:
            inside.append(line)
        else:
            prose.append(line)
    assert inside is None, f"{path}: a block of code does not end"
    return Page(path, "\n".join(prose), tuple(blocks))


def is_measurement(path: Path) -> bool:
    """A page that is never edited: its commands are those of the commit that it names."""
    return path.parent == DOCS / "results" and path.name.startswith("2026-")


def blocks_of(language: str) -> list[Block]:
    return [block for path in DOCUMENTS for block in read_page(path).blocks if block.language == language]


def split_commands(script: str) -> Iterator[list[str]]:
    """The words of each command of a script, without assignments; quotes and a backslash join lines."""
    command, quote = "", ""
    for line in script.splitlines():
        for position, char in enumerate(line):
            if char == "#" and not quote and (position == 0 or line[position - 1].isspace()):
                line = line[:position]
                break
            if char in "'\"" and quote in ("", char):
                quote = "" if quote else char
        command += line.removesuffix("\\") if not quote else line + "\n"
        if not quote and not line.endswith("\\"):
            words = shlex.split(command)
            if words and not re.match(r"\w+=", words[0]):
                yield words
            command = ""
    assert not command.strip(), f"the last command does not end: {command}"


class Call(typing.NamedTuple):
    """One command of a document."""

    name: str
    words: tuple[str, ...]


CALLS = [
    Call(block.name, tuple(words))
    for block in blocks_of("bash")
    if not is_measurement(block.path)
    for words in split_commands(block.text)
]
SPECRAY_CALLS = [
    Call(name, words[1:]) for name, words in dict.fromkeys(CALLS) if Path(words[0]).name == "specray"
]


def call_id(call: Call) -> str:
    return f"{call.name} {' '.join(call.words[:2])}"


def block_id(block: Block) -> str:
    return block.name


def test_commands_are_split_as_a_shell_does() -> None:
    script = "v='1'\na b  # not c\ncurl -d '{\n  \"x\": 1}' \\\n  --url 'y#z'\n# nothing\ne \"f g\"\n"
    assert list(split_commands(script)) == [
        ["a", "b"],
        ["curl", "-d", '{\n  "x": 1}', "--url", "y#z"],
        ["e", "f g"],
    ]


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_have_a_language_that_is_checked(path: Path) -> None:
    for block in read_page(path).blocks:
        assert block.language in LANGUAGES, block.name
        if not block.language:
            assert not re.search(r"^\s*(\$ |\S*specray [a-z]|pip |make |curl )", block.text, re.M), block.name


@pytest.mark.parametrize("block", blocks_of("bash"), ids=block_id)
def test_shell_blocks_are_valid_shell(block: Block) -> None:
    check = subprocess.run(
        ["bash", "-n"], input=block.text, text=True, capture_output=True, timeout=10, check=False
    )
    assert (check.returncode, check.stderr) == (0, "")


def test_every_command_is_one_that_is_checked() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    variables = set(re.findall(r"\$\((?:if \$\()?([A-Z_]+)", makefile))
    for name, words in CALLS:
        program = Path(words[0]).name
        if program == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, name
            assert {word.partition("=")[0] for word in words[1:] if "=" in word} <= variables, name
        else:
            assert program in OTHER_PROGRAMS | {"specray"}, name


def parse_command(words: Sequence[str]) -> tuple[str, Any]:
    """The command that the command line would run, and its values. Raises click's errors, runs nothing."""
    command = command_line()
    context = command.make_context("specray", list(words))
    names: list[str] = []
    while hasattr(command, "commands"):
        rest = [*getattr(context, "_protected_args", []), *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
        names.append(name)
    return " ".join(names), context.params


@pytest.mark.parametrize("call", SPECRAY_CALLS, ids=call_id)
def test_the_command_line_accepts_every_command(call: Call) -> None:
    _, values = parse_command(call.words)
    settings = values.get("settings") or []
    path = values.get("config") or values.get("config_path")
    build_config(path and ROOT / path, pair_options(), settings)


@pytest.mark.parametrize(
    "words", ["bench nothing", "serve --nothing", "bench serve --concurrency many", "keys"]
)
def test_the_command_line_refuses_what_there_is_not(words: str) -> None:
    with pytest.raises(Exception, match=r"nothing|valid integer|^$"):
        parse_command(words.split())


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if not is_measurement(path)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_prose_names_commands_and_options_that_there_are(path: Path) -> None:
    for line in re.findall(r"`specray ([a-z][^`]*)`", read_page(path).prose):
        words = line.split()
        command = command_line()
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        known = {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, line


def all_commands() -> Iterator[tuple[str, ...]]:
    def walk(command: Any, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield names
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, (*names, name))

    return walk(command_line(), ())


@pytest.mark.parametrize("names", list(all_commands()), ids=lambda names: " ".join(names) or "specray")
def test_every_command_explains_itself(names: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*names, "--help"])
    assert end.value.code == 0
    assert "Usage:" in capsys.readouterr().out


def test_benchmarks_has_every_measurement() -> None:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    names = [" ".join(names) for names in all_commands() if names[:1] == ("bench",) and len(names) > 1]
    assert len(names) >= 11
    assert [name for name in names if f"[`specray {name}`](" not in text] == []


def quick_call(start: str) -> Call:
    """The documents' first command of a kind that runs for real."""
    calls = (call for call in SPECRAY_CALLS if " ".join(call.words).startswith(start))
    return next(call for call in calls if "--server" not in call.words)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", QUICK_COMMANDS)
def test_quick_commands_run(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = list(quick_call(start).words)
    if "--max-tokens" in words:
        words[words.index("--max-tokens") + 1] = "4"
        words += ["--set", "target.profile_s=0", "--set", "draft.profile_s=0"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pair, "start_worker", forked_worker)
    assert run(words) == 0, capfd.readouterr().err
    printed = capfd.readouterr()
    assert printed.out.strip()
    assert "Traceback" not in printed.err


MODULE_CALLS = [
    Call(name, words[2:])
    for name, words in CALLS
    if Path(words[0]).name == "python" and words[1] == "-m" and words[2].startswith("specray.")
]
"""Commands that run a module of specray."""


@pytest.mark.parametrize("call", MODULE_CALLS, ids=call_id)
def test_modules_that_are_run_exist_and_have_these_options(call: Call) -> None:
    module, *words = call.words
    spec = importlib.util.find_spec(module)
    assert spec is not None
    folder = spec.submodule_search_locations
    files = list(Path(folder[0]).glob("*.py")) if folder else [Path(spec.origin or "")]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    # convert_gguf hands its options on to llama.cpp's converter.
    options = (
        {word for word in words if word.startswith("--")} if not module.endswith(".convert_gguf") else set()
    )
    assert [option for option in options if f'"{option}"' not in source] == []


@pytest.mark.parametrize("call", [call for call in CALLS if "/v1/" in "".join(call.words)], ids=call_id)
def test_bodies_of_requests_are_valid(call: Call) -> None:
    body = json.loads(call.words[call.words.index("-d") + 1])
    is_chat = any("/v1/chat/" in word for word in call.words)
    request = parse_request(ChatCompletionRequest if is_chat else CompletionRequest, body)
    request.options()
    assert body["model"] in {Config().model_name, DEFAULT_MODEL.name}


@pytest.mark.parametrize("block", blocks_of("yaml"), ids=block_id)
def test_yaml_blocks_are_configurations(block: Block) -> None:
    values = yaml.safe_load(block.text)
    for application in values.get("applications", [{"args": values}]):
        parse_config(application["args"])
        for deployment in application.get("deployments", []):
            parse_config({**application["args"], **deployment.get("user_config", {})})


@pytest.mark.parametrize("block", blocks_of("python"), ids=block_id)
def test_python_blocks_compile_and_their_imports_exist(block: Block) -> None:
    tree = ast.parse(block.text)
    compile(tree, block.name, "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specray"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


@cache
def anchors_of(path: Path) -> frozenset[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", read_page(path).prose, re.M)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return frozenset(
        slug if not (before := slugs[:index].count(slug)) else f"{slug}-{before}"
        for index, slug in enumerate(slugs)
    )


def links_of(path: Path) -> list[str]:
    prose = re.sub(r"(?<!\[)`[^`\n]*`(?!\])", "", read_page(path).prose)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in links_of(path):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target), link


def test_the_site_has_every_page() -> None:
    index = DOCS / "index.md"
    entries = [
        line
        for block in read_page(index).blocks
        if block.language == TOCTREE
        for line in block.text.splitlines()
        if line and not line.startswith(":")
    ]
    pages = [page for entry in entries for page in DOCS.glob(f"{entry}.md" if "*" not in entry else entry)]
    assert sorted(pages) == sorted({*DOCS.rglob("*.md")} - {index})


def test_readme_links_every_page() -> None:
    linked = {(README.parent / link.partition("#")[0]).resolve() for link in links_of(README)}
    assert set(DOCS.glob("*.md")) <= linked
    results = {(DOCS / "results" / link).resolve() for link in links_of(DOCS / "results" / "README.md")}
    assert set((DOCS / "results").glob("*.md")) - {DOCS / "results" / "README.md"} <= results


def test_the_recipes_of_contributing_name_files_that_exist() -> None:
    text = (DOCS / "contributing.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w./-]+)`", text) if "/" in name and not name.startswith(".")}
    assert len(named) > 60
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    headings = re.findall(r"^### (.+)$", text, re.M)
    for name in ("option", "drafter", "family", "format", "kernel", "metric", "fault", "measurement"):
        assert any(name in heading for heading in headings), name
