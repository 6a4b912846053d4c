"""The text of a run: rows that the target writes, kept as files so that an interrupted run goes on."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specray.errors import ConfigError
from specray.train.corpus import CorpusConfig, training_files
from specray.train.draft.markers import TurnMarkers
from specray.train.draft.prompts import Beginnings, Encode, passages_of
from specray.train.draft.writing import Written, write_rows
from specray.train.loop import progress_bar

_log = logging.getLogger(__name__)

_NUM_HELD_OUT_ROWS = 48


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Options of the writing."""

    writing_budget_s: float = 3600.0
    """Seconds in which the target writes; a batch that has begun is finished."""
    num_rows: int = 100_000
    """Rows of text, at most."""
    rows_per_batch: int = 32
    """Rows that are written side by side."""
    row_len: int = 768
    """Tokens of a row."""
    seed: int = 0


def written_text(
    model: Any, tokenizer: Any, work_dir: Path, config: TextConfig, markers: TurnMarkers | None
) -> Written:
    """All that the target writes; batches are kept as files in ``work_dir/written``.

    Args:
        markers: of the target's chat template; None: it has none, and writes plain text alone.

    Raises:
        ConfigError: the directory holds rows of another length.
    """
    directory = work_dir / "written"
    directory.mkdir(parents=True, exist_ok=True)
    passages = _passages(work_dir / "passages.json")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    began = time.monotonic()
    opening, ask = _plain_opening(tokenizer), None if markers is not None else _asker(tokenizer)
    with progress_bar() as bar:
        task = bar.add_task("writing", total=1000, figures="")
        for index in range(num_batches := -(-config.num_rows // config.rows_per_batch)):
            file = directory / f"{index:05d}.npz"
            if file.exists():
                continue
            elapsed_s = time.monotonic() - began
            share = max(elapsed_s / config.writing_budget_s, index / num_batches)
            bar.update(
                task, completed=int(1000 * min(share, 1)), figures=f"rows {index * config.rows_per_batch}"
            )
            if elapsed_s > config.writing_budget_s:
                break
            seed = config.seed + index
            beginnings = Beginnings(markers, encode, passages, seed=seed, opening=opening, ask=ask)
            drawn = beginnings.draw(config.rows_per_batch)
            batch = write_rows(model, drawn, markers, row_len=config.row_len, seed=seed)
            partial = file.with_suffix(".partial.npz")
            np.savez(partial, token_ids=batch.token_ids, is_answer=batch.is_answer)
            partial.replace(file)
    batches = list(_batches(directory))
    lengths = {batch.token_ids.shape[1] for batch in batches}
    if lengths != {config.row_len}:
        raise ConfigError(
            f"row_len is {config.row_len}, but {str(directory)!r} holds rows of {sorted(lengths)} tokens; "
            "allowed: that length, or another directory"
        )
    return Written(
        *(np.concatenate([getattr(b, name) for b in batches]) for name in ("token_ids", "is_answer"))
    )


def split_held_out(written: Written) -> tuple[Written, Written]:
    """Rows to train on, and rows to evaluate on: the first ones, a tenth at most."""
    count = min(_NUM_HELD_OUT_ROWS, max(1, len(written.token_ids) // 10))
    parts = (slice(count, None), slice(None, count))
    train, held_out = (Written(written.token_ids[part], written.is_answer[part]) for part in parts)
    return train, held_out


def picked_rows(cursor: int, count: int, *, num_rows: int, seed: int) -> list[int]:
    """Some rows of an endless seeded shuffle, from place ``cursor`` on."""
    picked: list[int] = []
    while len(picked) < count:
        epoch, place = divmod(cursor + len(picked), num_rows)
        order = np.random.default_rng((seed, epoch)).permutation(num_rows)
        picked += order[place : place + count - len(picked)].tolist()
    return picked


def _plain_opening(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer puts before any text."""
    ids = tokenizer.encode("", add_special_tokens=True)
    return tuple(token_id for token_id in ids[:1] if token_id == tokenizer.bos_token_id)


def _asker(tokenizer: Any) -> Encode | None:
    if not tokenizer.chat_template:
        return None

    def ask(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return ask


def _passages(file: Path) -> list[str]:
    """Those of the first call, so that a run that goes on elsewhere reads the same."""
    if not file.exists():
        _log.info("collecting passages from the Python files that are installed here")
        texts = passages_of(training_files(CorpusConfig(max_source_bytes=1_000_000)))
        file.write_text(json.dumps(texts), "utf-8")
    passages: list[str] = json.loads(file.read_text("utf-8"))
    return passages


def _batches(directory: Path) -> Iterator[Written]:
    for file in sorted(directory.glob("[0-9]*[0-9].npz")):
        saved = np.load(file)
        yield Written(saved["token_ids"], saved["is_answer"])
