"""Tests of a pair without Ray: worker processes that start, serve, fail to start, and end."""

from __future__ import annotations

import functools
import os
import socket
import sys
from pathlib import Path

import pytest

from specray.cli.generate import Sampling, from_own_pair, print_pieces
from specray.config import parse_config
from specray.errors import ConfigError
from specray.fakes import ToyModel
from specray.serving.calls.generate_requests import to_generate_requests
from specray.serving.calls.limits import ServiceLimits
from specray.serving.generation import stream
from specray.serving.local.pair import DraftHost, local_pair, local_router, sharing_gpu
from specray.serving.validation import GenerationOptions
from specray.tokenization import make_stop_matcher
from tests.unit.serving.http.service import TOKENIZER, wait_until
from tests.unit.tokenization.tiny_tokenizer import EOS, write_tiny_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts processes through /proc"),
]

MARK = b"SPECRAY_TEST_HOST=draft"
RUN_MARKED = (
    "import os, sys; os.execve(sys.argv[1], sys.argv[1:], {**os.environ, 'SPECRAY_TEST_HOST': 'draft'})"
)
"""Program that stands for ``ip netns exec``: becomes the command that follows."""

WORKER = (sys.executable, str(Path(__file__).with_name("worker.py")))


def num_children() -> int:
    """Returns the number of living processes that this one has started."""
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def num_marked_children() -> int:
    """Returns how many of them RUN_MARKED became."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return sum(MARK in Path(f"/proc/{pid}/environ").read_bytes() for pid in children)


async def generate(
    config_values: dict[str, object], command: tuple[str, ...]
) -> tuple[list[int], float | None]:
    """Returns eight greedy tokens of the prompt (5, 6), and the acceptance rate."""
    config = parse_config(config_values)
    stop_matchers = make_stop_matcher(TOKENIZER)
    num_before = num_children()
    async with local_router(config, stop_matchers=stop_matchers, worker_command=command) as router:
        assert num_children() - num_before == (2 if config.draft.has_model else 1)
        limits = await ServiceLimits(router, TOKENIZER, config).get()
        options = GenerationOptions(max_tokens=8, temperature=0, seed=0, ignore_eos=True)
        requests = to_generate_requests([(5, 6)], options, limits=limits, request_id="test")
        deltas = [delta async for delta in stream(router, requests, TOKENIZER, timeout_s=30)]
    stats = deltas[-1].stats
    assert stats is not None
    return [token for delta in deltas for token in delta.token_ids], stats.draft_acceptance_rate


async def test_local_pair_gives_the_targets_tokens_and_leaves_no_process() -> None:
    num_before = num_children()
    tokens, acceptance_rate = await generate({}, WORKER)
    assert tuple(tokens) == ToyModel(vocab_size=264).generate((5, 6), 8)
    assert acceptance_rate == 1.0
    await wait_until(lambda: num_children() == num_before)


async def test_draft_on_a_host_of_its_own_is_started_there_and_reached_over_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    host = DraftHost(address, (sys.executable, "-c", RUN_MARKED))
    num_before = num_children()
    async with local_pair(parse_config({}), worker_command=WORKER, draft_host=host) as pair:
        assert pair.draft == address
        target, draft = await pair.infos()
        assert draft is not None
        assert (target.role, draft.role) == ("target", "draft")
        assert num_marked_children() == 1
    await wait_until(lambda: num_children() == num_before)


async def test_local_target_alone() -> None:
    tokens, acceptance_rate = await generate({"draft": {"enabled": False}}, WORKER)
    assert tuple(tokens) == ToyModel(vocab_size=264).generate((5, 6), 8)
    assert acceptance_rate is None


@pytest.mark.parametrize("draft", ["ngram", "suffix"])
async def test_draft_that_needs_no_model_has_no_process(draft: str) -> None:
    tokens, _ = await generate({"draft": {"model": draft}}, WORKER)
    assert tuple(tokens) == ToyModel(vocab_size=264).generate((5, 6), 8)


async def test_generate_from_its_own_pair_prints_the_targets_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    num_before = num_children()
    with_fakes = functools.partial(local_router, worker_command=WORKER)
    monkeypatch.setattr("specray.serving.local.pair.local_router", with_fakes)
    path = str(write_tiny_tokenizer(tmp_path))
    config = parse_config({"target": {"model": path}, "draft": {"model": path}})
    sampling = Sampling(max_tokens=8, temperature=0, top_p=1, seed=0, stop=[], speculation=True)
    await print_pieces(from_own_pair(config, "def", sampling))
    output = ToyModel(vocab_size=264).generate(TOKENIZER.encode("def"), 8)
    assert EOS not in output
    captured = capsys.readouterr()
    assert captured.out == TOKENIZER.decode(output) + "\n"
    assert "8 tokens" in captured.err and "(1.00)" in captured.err
    await wait_until(lambda: num_children() == num_before)


async def test_worker_that_does_not_start_is_a_config_error_with_its_reason() -> None:
    num_before = num_children()
    with pytest.raises(
        ConfigError, match=r"^(target|draft) worker: target\.model: /models/x does not exist$"
    ):
        async with local_router(parse_config({}), worker_command=(*WORKER, "--fail")):
            pytest.fail("the block must not run")
    assert num_children() == num_before


def test_engines_of_one_machine_share_its_gpu_unless_told_otherwise() -> None:
    def parts(values: dict[str, object]) -> tuple[object, object]:
        config = sharing_gpu(parse_config(values))
        return tuple(each.ray_actor_options.get("num_gpus") for each in (config.target, config.draft))  # type: ignore[return-value]

    assert parts({}) == (0.5, 0.5)
    assert parts({"target": {"ray_actor_options": {"num_gpus": 0.9}}}) == (0.9, 0.5)
    assert parts({"target": {"tensor_parallel_size": 2}}) == (None, 0.5)
    assert parts({"draft": {"model": "ngram"}}) == (None, None)
