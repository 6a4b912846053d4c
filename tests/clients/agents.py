"""Checks of coding agents in their non-interactive modes: each reads a file with a tool, then edits it.

The agents are unmodified. A proxy adds a grammar to their requests, by which the model writes the calls: a
small model would write others, or none. All else is the service's own: prompts, tokens, readers and streams.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.checks import SKIPPED, Server, check
from tests.clients.dialects import Dialect, dialect_of
from tests.clients.recorder import Recorder, recording

TIMEOUT_S = 1500.0
"""Seconds of a whole run: its first prompt has 8,000 to 19,000 tokens."""
BINARIES = Path(".venv-clients/node_modules/.bin")
WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
LAST_WORDS = "The sum is mended."
TASK = "add() in calc.py subtracts. Mend it."


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model is made to write."""

    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Script:
    """What the model writes, an answer for each number of results that a request has."""

    calls: Sequence[Call]
    dialect: Dialect

    def body(self, path: str, body: bytes) -> bytes:
        """The request with a grammar for its answer; one without tools, as for a title, is kept short."""
        fields: dict[str, Any] = json.loads(body)
        if not fields.get("tools"):
            fields["max_output_tokens" if "/responses" in path else "max_tokens"] = 8
            return json.dumps(fields).encode()
        num_results = _num_results(fields)
        is_last = num_results >= len(self.calls)
        call = None if is_last else self.calls[num_results]
        text = LAST_WORDS if call is None else None
        fields["structured_outputs"] = {
            "grammar": self.dialect.grammar(call and (call.name, call.arguments), text)
        }
        fields["temperature"] = 0
        self.dialect.without_thinking(fields)
        return json.dumps(fields).encode()


def _num_results(fields: Mapping[str, Any]) -> int:
    """Number of results of tools in a conversation, in any of the three APIs."""
    items: list[Any] = [*fields.get("messages", []), *_items(fields.get("input"))]
    blocks = [block for item in items if isinstance(item.get("content"), list) for block in item["content"]]
    return sum(
        part.get("role") == "tool" or part.get("type") in ("function_call_output", "tool_result")
        for part in [*items, *blocks]
    )


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def mends_a_file(
    server: Server, program: str, calls: Sequence[Call], options: Sequence[str]
) -> list[dict[str, Any]]:
    """Runs an agent on a directory with one file. Returns the requests that it sent.

    Args:
        options: of its command line; ``{url}`` and ``{model}`` stand for the server's.
    """
    binary = BINARIES.absolute() / program
    if not binary.exists():
        raise RuntimeError(f"{SKIPPED}: {program} is not installed (npm)")
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60, check=True)
    print(f"{program} {version.stdout.strip()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="specray-agent-") as folder:
        work, home = Path(folder, "work"), Path(folder, "home")
        work.mkdir()
        home.mkdir()
        (work / "calc.py").write_text(WRONG)
        placed = [
            Call(
                call.name, {key: value.replace("{work}", str(work)) for key, value in call.arguments.items()}
            )
            for call in calls
        ]
        with recording(server, Script(placed, dialect_of(server)).body) as recorder:
            said = _run(recorder, [str(binary), *options], work, home)
        statuses = {(request["path"], request["status"]) for request in recorder.requests if request["body"]}
        assert all(status == 200 for _, status in statuses), f"answers {statuses}; it said {said[-2000:]}"
        assert (work / "calc.py").read_text() == RIGHT, f"the file is not mended; it said {said[-2000:]}"
        assert LAST_WORDS in said, f"the last answer is missing; it said {said[-2000:]}"
    return recorder.requests


def _run(recorder: Recorder, command: Sequence[str], work: Path, home: Path) -> str:
    server = recorder.server
    values = {"url": server.url, "model": server.model}
    filled = [part.replace("{url}", server.url).replace("{model}", server.model) for part in command]
    (work / "opencode.json").write_text(json.dumps(_opencode(server)))
    environment = {
        **{name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ},
        "HOME": str(home),
        "SPECRAY_API_KEY": server.key,
        "ANTHROPIC_BASE_URL": values["url"],
        "ANTHROPIC_API_KEY": server.key,
        "ANTHROPIC_MODEL": values["model"],
        "ANTHROPIC_SMALL_FAST_MODEL": values["model"],
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1024",
        "API_TIMEOUT_MS": str(int(TIMEOUT_S * 1000)),
        # Else five minutes without a token end a stream, and a long prompt takes more on a slow machine.
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(int(TIMEOUT_S * 1000)),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    done = subprocess.run(
        filled,
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"exit code {done.returncode}: {said[-2000:]}"
    return said


def _opencode(server: Server) -> dict[str, Any]:
    options = {"baseURL": server.base_url, "apiKey": server.key, "timeout": False}
    model = {"name": server.model, "limit": {"context": 32_000, "output": 1024}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {server.model: model}}
    return {"provider": {"specray": provider}, "autoupdate": False, "share": "disabled"}


def claude_code(server: Server) -> list[dict[str, Any]]:
    edit = {"file_path": "{work}/calc.py", "old_string": "a - b", "new_string": "a + b"}
    calls = [Call("Read", {"file_path": "{work}/calc.py"}), Call("Edit", edit)]
    return mends_a_file(server, "claude", calls, ["-p", TASK, "--allowedTools", "Read", "Edit"])


def codex(server: Server) -> list[dict[str, Any]]:
    patch = (
        "*** Begin Patch\n*** Update File: calc.py\n@@\n-    return a - b\n+    return a + b\n*** End Patch"
    )
    calls = [
        Call("exec_command", {"cmd": "cat calc.py"}),
        Call("exec_command", {"cmd": f"apply_patch <<'EOF'\n{patch}\nEOF"}),
    ]
    retries = "request_max_retries=0,stream_max_retries=0,stream_idle_timeout_ms=1500000"
    address = 'base_url="{url}/v1",wire_api="responses",env_key="SPECRAY_API_KEY"'
    options = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-m", "{model}"]
    options += ["-c", "model_provider=specray"]
    options += ["-c", f'model_providers.specray={{name="specray",{address},{retries}}}', TASK]
    return mends_a_file(server, "codex", calls, options)


def opencode(server: Server) -> list[dict[str, Any]]:
    edit = {"filePath": "{work}/calc.py", "oldString": "a - b", "newString": "a + b"}
    calls = [Call("read", {"filePath": "{work}/calc.py"}), Call("edit", edit)]
    return mends_a_file(server, "opencode", calls, ["run", "--model", "specray/{model}", TASK])


AGENTS = {"claude-code": claude_code, "codex": codex, "opencode": opencode}


@check("claude-code")
def claude_code_mends_a_file(server: Server) -> None:
    claude_code(server)


@check("codex")
def codex_mends_a_file(server: Server) -> None:
    codex(server)


@check("opencode")
def opencode_mends_a_file(server: Server) -> None:
    opencode(server)
