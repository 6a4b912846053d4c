"""Compares a forward over the block cache with the library's own, in all that serving does with a cache.

Two sequences in one step, a prompt in chunks, single tokens beyond every window, a rollback, and branches;
logits against those of a plain forward over the whole sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specray.engine.cache.blocks import BlockCache
from specray.engine.model.checks.messages import first_line
from specray.engine.model.checks.miniature import build_miniature, token_ids, windows
from specray.engine.step import AttentionStep, CacheShape, Forward, SequenceRows, Step
from specray.engine.visibility import branch_visibility
from specray.errors import ConfigError

ALLOWED_ERROR = 1e-3
"""Root mean square of the logits' differences over their deviation, in float32."""
_MARGIN = 11
"""Tokens of a checked sequence beyond twice the longest window."""
_NUM_OTHER = 9
"""Tokens of the second sequence."""
_BRANCH_LEN = 3
"""Tokens of each branch."""
_NUM_SINGLE = 3
"""Tokens that the library computes one by one, with its own cache."""


def check_architecture(
    config: PreTrainedConfig, *, max_model_len: int, make_forward: Callable[[PreTrainedModel], Forward]
) -> None:
    """Raises ConfigError, with the reason, when a forward does not compute a miniature of the architecture.

    Args:
        config: of the whole model.
        make_forward: from a model of the library, whose attention it may replace.
    """
    model = build_miniature(config, max_model_len=max_model_len)
    name = type(model).__name__
    longest = max(windows(model.config.get_text_config()).values(), default=0)
    longest = longest if longest < max_model_len else 0
    sample = _sample(model, min(2 * longest + _MARGIN, max_model_len - _BRANCH_LEN))
    try:
        with _one_thread():
            expected = _expected(model, sample)
            _check_own_cache(model, sample.first, expected[0])
            forward = make_forward(model)
            error = _compare(forward, expected, sample)
    except ConfigError:
        raise
    except Exception as problem:  # An architecture that calls attention in its own way fails in its own way.
        raise ConfigError(
            f"{name} is not supported: its attention cannot run over the cache ({first_line(problem)})"
        ) from None
    if not error < ALLOWED_ERROR:
        raise ConfigError(
            f"{name} is not supported: over the cache its logits are off by {error:.2g} of their deviation "
            f"(allowed: {ALLOWED_ERROR}); it keeps more than keys and values, or attends in its own way"
        )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class _Sample:
    """What is computed: a sequence, tokens that are rolled back, a second sequence, and two branches."""

    first: list[int]
    rejected: list[int]
    second: list[int]
    branches: tuple[tuple[int, list[int]], ...]
    """Each with the number of tokens of ``first`` that it continues."""


def _sample(model: PreTrainedModel, length: int) -> _Sample:
    config = model.config.get_text_config()
    first = token_ids(length, seed=1, config=config)
    return _Sample(
        first=first,
        rejected=token_ids(4, seed=2, config=config),
        second=token_ids(min(_NUM_OTHER, length), seed=3, config=config),
        branches=(
            (length, token_ids(_BRANCH_LEN, seed=4, config=config)),
            (length - 2, token_ids(_BRANCH_LEN, seed=5, config=config)),
        ),
    )


@torch.inference_mode()
def _expected(model: PreTrainedModel, sample: _Sample) -> list[torch.Tensor]:
    def plain(tokens: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
        return logits.float()

    branches = [
        plain([*sample.first[:prefix_len], *tokens])[-len(tokens) :] for prefix_len, tokens in sample.branches
    ]
    return [plain(sample.first), plain(sample.second), *branches]


@torch.inference_mode()
def _check_own_cache(model: PreTrainedModel, tokens: list[int], expected: torch.Tensor) -> None:
    """Raises ConfigError where the library's own cache gives other logits than its forward without one.

    What it generates is another text then, as where its cache goes by a window that the layers do not have.

    Args:
        expected: logits of the tokens without a cache.
    """
    first = len(tokens) - _NUM_SINGLE
    try:
        output = model(torch.tensor([tokens[:first]]), use_cache=True)
        rows = []
        for position in range(first, len(tokens)):
            output = model(
                torch.tensor([tokens[position : position + 1]]),
                position_ids=torch.tensor([[position]]),
                past_key_values=output.past_key_values,
                use_cache=True,
            )
            rows.append(output.logits[0].float())
    except Exception:  # Of models that want more than that to go on: nothing is known of those.
        return
    error = _error(torch.cat(rows), expected[first:])
    if error < ALLOWED_ERROR:
        return
    reason = _cause(model, tokens, expected) or (
        f"with transformers' own cache its logits are off by {error:.2g} of their deviation (allowed: "
        f"{ALLOWED_ERROR})"
    )
    raise ConfigError(f"{type(model).__name__} is not supported: {reason}")


def _cause(model: PreTrainedModel, tokens: list[int], expected: torch.Tensor) -> str | None:
    """Why a cache gives other logits than ``expected``; None: unknown."""
    half = len(tokens) // 2
    alone = model(torch.tensor([tokens[:half]]), use_cache=False).logits[0].float()
    if not _error(alone, expected[:half]) < ALLOWED_ERROR:
        cause = " (is_decoder is false)" if getattr(model.config, "is_decoder", None) is False else ""
        return f"its tokens see those after them{cause}"
    positions = torch.arange(len(tokens))[None]
    counted = model(torch.tensor([tokens]), position_ids=positions, use_cache=False).logits[0].float()
    if not _error(counted, expected) < ALLOWED_ERROR:
        return "its positions do not begin at 0, as RoBERTa's do not"
    return None


def _error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of differences over the deviation."""
    return float((logits - expected).square().mean().sqrt() / expected.std())


def _compare(forward: Forward, expected: list[torch.Tensor], sample: _Sample) -> float:
    """The largest error of a part, which the cache's own bookkeeping makes no smaller."""
    logits = _over_the_cache(forward, sample)
    return max(_error(got, want) for got, want in zip(logits, expected, strict=False))


def _over_the_cache(forward: Forward, sample: _Sample) -> list[torch.Tensor]:
    num_first, num_second = len(sample.first), len(sample.second)
    room = num_first + max(len(sample.rejected), 2 * _BRANCH_LEN)
    cache = _cache(forward.cache_shape, block_size=room)
    steps = _Steps(forward, cache)
    half, middle = num_first // 2, num_second // 2
    # The first chunk of one sequence next to the first of another, then each goes on next to the other.
    begun = steps.run((0, 0, sample.first[:half]), (1, 0, sample.second[:middle]))
    went_on = steps.run((1, middle, sample.second[middle:]), (0, half, sample.first[half : num_first - 5]))
    # Tokens that were refused, after one that was not, are overwritten, one by one.
    tried = [sample.first[num_first - 5], *sample.rejected]
    [verified] = steps.run((0, num_first - 5, tried))
    singles = [
        steps.run((0, position, [sample.first[position]]))[0] for position in range(num_first - 4, num_first)
    ]
    return [
        torch.cat([begun[0], went_on[1], verified[:1], *singles]),
        torch.cat([begun[1], went_on[0]]),
        *steps.run_branches(num_first, sample.branches),
    ]


def _cache(shape: CacheShape, *, block_size: int) -> BlockCache:
    return BlockCache(
        shape,
        num_blocks=2,
        block_size=block_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps over a cache in which each sequence has one block."""

    forward: Forward
    cache: BlockCache

    def run(self, *parts: tuple[int, int, list[int]]) -> list[torch.Tensor]:
        """Logits of each part, which is a sequence, the position of its first new token, and the tokens."""
        rows: list[SequenceRows] = []
        tokens: list[int] = []
        positions: list[int] = []
        for sequence, start, new in parts:
            rows.append(SequenceRows(len(tokens), len(new), start, [sequence]))
            tokens += new
            positions += range(start, start + len(new))
        logits = self._forward(tokens, positions, tuple(rows))
        return list(torch.split(logits, [len(new) for _, _, new in parts]))

    def run_branches(self, first_index: int, branches: Sequence[tuple[int, list[int]]]) -> list[torch.Tensor]:
        """Logits of branches of sequence 0, which grow token by token side by side."""
        grown: list[list[torch.Tensor]] = [[] for _ in branches]
        for depth in range(_BRANCH_LEN):
            rows = [
                branch_visibility(prefix_len, first_index + i * _BRANCH_LEN, 1 + depth)
                for i, (prefix_len, _) in enumerate(branches)
            ]
            positions = [row.position for row in rows]
            sequence = SequenceRows(0, len(rows), min(positions), [0], tuple(rows))
            logits = self._forward([tokens[depth] for _, tokens in branches], positions, (sequence,))
            for own, row in zip(grown, torch.split(logits, 1), strict=True):
                own.append(row)
        return [torch.cat(rows) for rows in grown]

    @torch.inference_mode()
    def _forward(
        self, tokens: list[int], positions: list[int], rows: tuple[SequenceRows, ...]
    ) -> torch.Tensor:
        attention = AttentionStep(rows, self.cache)
        step = Step(torch.tensor(tokens), torch.tensor(positions), attention, None)
        return self.forward(step).logits
