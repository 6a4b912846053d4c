"""Tasks: what is read from files, which programs pass, and what a service that loses some is found to do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from specray.bench.verify.plan import SELF
from specray.bench.verify.report import verify_table
from specray.bench.verify.run import verify, worse_p_value
from specray.bench.verify.sandbox import passes
from specray.bench.verify.tasks import Task, TaskKind, load_tasks
from specray.errors import ConfigError
from specray.requests import GenerateRequest
from tests.unit.bench.verify.test_verify import PLAN, PROMPTS, VOCABULARY, Service, VerifyPlan
from tests.unit.serving.http.service import INFO, TOKENIZER, serving

ADD: dict[str, Any] = {
    "prompt": "def add(a, b):\n",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
    "entry_point": "add",
}


def write(path: Path, *entries: Any) -> Path:
    text = "\n".join(json.dumps(entry) for entry in entries)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "is_passed"),
    [
        ("assert 1 + 1 == 2", True),
        ("assert 1 + 1 == 3", False),
        ("import sys\nsys.exit(0)", False),
        ("def f(:", False),
        ("import os\nassert not set(os.environ) - {'LC_CTYPE'} and not os.listdir()", True),
        ("x = bytearray(2 << 30)", False),
        ("open('big', 'wb').write(b'x' * (4 << 20))", False),
        ("import sys\nassert sys.stdin.read() == ''", True),
    ],
)
async def test_a_program_passes_only_within_its_limits_and_at_its_end(program: str, is_passed: bool) -> None:
    assert await passes(program, timeout_s=3.0) is is_passed


@pytest.mark.slow
@pytest.mark.parametrize("program", ["import time\ntime.sleep(60)", "while True:\n    pass"])
async def test_a_program_that_waits_or_works_on_is_ended_at_its_deadline(program: str) -> None:
    assert not await passes(program, timeout_s=0.5)


@pytest.mark.slow
async def test_humaneval_runs_prompt_answer_and_test(tmp_path: Path) -> None:
    [task] = load_tasks(TaskKind.HUMANEVAL, write(tmp_path / "tasks.jsonl.gz", ADD, ADD), 1)
    assert await task.is_solved("    return a + b\n")
    assert not await task.is_solved("    return a - b\n")
    assert "\ndef " in task.stops


async def test_answers_are_compared_but_for_space_around_them(tmp_path: Path) -> None:
    lines = ({"question": "2+2=", "answer": " 4"}, {"prompt": "a", "target": "b", "until": ";"})
    first, second = load_tasks(TaskKind.ANSWERS, write(tmp_path / "tasks.jsonl", *lines), 9)
    assert (first.prompt, first.stops, second.stops) == ("2+2=", ("\n",), (";",))
    assert await first.is_solved("4 ") and not await first.is_solved("5")


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        (TaskKind.HUMANEVAL, {"prompt": "a", "test": "b"}),
        (TaskKind.HUMANEVAL, {**ADD, "entry_point": "add); print("}),
        (TaskKind.ANSWERS, {"prompt": "a"}),
        (TaskKind.ANSWERS, {"prompt": "a", "target": "b", "until": [""]}),
        (TaskKind.ANSWERS, ["prompt"]),
    ],
)
def test_what_is_no_task_is_named_with_its_line(kind: TaskKind, entry: Any, tmp_path: Path) -> None:
    good = {**ADD, "target": "b"}
    path = write(tmp_path / "tasks.jsonl", good, entry)
    with pytest.raises(ConfigError, match=rf"tasks\.jsonl, line 2: there is no task of {kind}"):
        load_tasks(kind, path, 9)


@pytest.mark.parametrize(("text", "message"), [("", "there is no task"), ("{", "is not JSON lines")])
def test_files_that_are_none_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tasks(TaskKind.ANSWERS, path, 9)
    with pytest.raises(ConfigError, match="No such file"):
        load_tasks(TaskKind.ANSWERS, tmp_path / "none", 9)


def test_the_chance_of_lost_tasks_is_that_of_a_coin() -> None:
    assert worse_p_value(0, 0) == 1.0
    assert worse_p_value(3, 0) == 1 / 8
    assert worse_p_value(2, 1) == 1 / 2
    assert worse_p_value(0, 5) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("is_faulty", [False, True])
async def test_a_service_that_solves_fewer_tasks_with_drafts_is_at_fault(is_faulty: bool) -> None:
    right = VOCABULARY[:3]

    def reply(request: GenerateRequest) -> list[int]:
        return right[::-1] if is_faulty and request.speculation.enabled is not False else right

    tasks = [Task("a", ("\n",), target=TOKENIZER.decode(right))] * 20
    plan = {**PLAN, "num_samples": 0}
    async with serving(Service(reply=reply, info=INFO)) as service:
        result = await verify(VerifyPlan(url=service.url, **plan), PROMPTS, tasks, lambda *_: None)
    found = {one.way: (one.num_solved, one in result.faults) for one in result.comparisons if one.num_solved}
    chosen = (20, 0, 20) if is_faulty else (20, 20, 20)
    assert found == {SELF: ((20, 20, 20), False), "as the service chooses": (chosen, is_faulty)}
    assert f"{chosen[1]} of 20, plain 20" in list(verify_table(result).columns[2].cells)
