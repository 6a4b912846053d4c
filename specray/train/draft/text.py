"""The text of a run: rows that the target writes, stored as files so that an interrupted run goes on."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specray.errors import ConfigError
from specray.train.corpus import CorpusConfig, training_files
from specray.train.draft.markers import TurnMarkers
from specray.train.draft.prompt_file import Prompts, parse_mix, read_prompts, split_prompts
from specray.train.draft.prompts import OWN_MIX, Beginnings, Encode, passages_of
from specray.train.draft.writing import Written, write_rows
from specray.train.loop import progress_bar

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Options of the writing."""

    writing_budget_s: float = 3600.0
    """Seconds in which the target writes, of all calls together; a batch that has begun is finished."""
    num_rows: int = 100_000
    """Rows of text, at most."""
    rows_per_batch: int = 32
    """Rows that are written side by side."""
    row_len: int = 768
    """Tokens of a row."""
    seed: int = 0
    prompts: str | None = None
    """File with prompts (``prompt_file.read_prompts``); None: the target begins all text itself."""
    mix: str | None = None
    """Shares of domains (``prompt_file.parse_mix``); None: as prompts are spread."""
    asks: bool = True
    """Prompts are asked through the target's chat template, where it has one; False: they are continued."""


def written_text(
    model: Any, tokenizer: Any, work_dir: Path, config: TextConfig, markers: TurnMarkers | None
) -> Written:
    """All that the target writes; batches are stored as files in ``work_dir/written``.

    Args:
        markers: of the target's chat template; None: it has none, and writes plain text alone.

    Raises:
        ConfigError: the directory holds rows of another length, of another target or of other prompts, or
            the prompts cannot be used.
    """
    directory = work_dir / "written"
    directory.mkdir(parents=True, exist_ok=True)
    source = _TextSource(tokenizer, work_dir, config, markers)
    _check_source(directory, model, config)
    ends, spent = end_ids(model, tokenizer), _Spent(directory)
    with progress_bar() as bar:
        task = bar.add_task("writing", total=1000, figures="")
        for index in range(num_batches := -(-config.num_rows // config.rows_per_batch)):
            file = directory / f"{index:05d}.npz"
            if file.exists():
                continue
            first_place = index * config.rows_per_batch
            share = max(spent.seconds / config.writing_budget_s, index / num_batches)
            bar.update(task, completed=int(1000 * min(share, 1)), figures=f"rows {first_place}")
            if spent.seconds > config.writing_budget_s:
                break
            batch = write_rows(
                model,
                source.beginnings(index).draw(config.rows_per_batch, first_place=first_place),
                source.markers,
                row_len=config.row_len,
                seed=config.seed + index,
                first_place=first_place,
                end_ids=ends,
            )
            partial = file.with_suffix(".partial.npz")
            np.savez(partial, **asdict(batch))
            partial.replace(file)
            spent.note()
    written = _joined(list(_batches(directory)), directory, config.row_len)
    return written[np.arange(len(written.token_ids)) < config.num_rows]


def end_ids(model: Any, tokenizer: Any) -> set[int]:
    """Tokens after which a server stops."""
    settings = getattr(model, "generation_config", None)
    ends = getattr(settings, "eos_token_id", None)
    found = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return {each for each in found if each is not None}


class _Spent:
    """Seconds in which text was written, of this call and of those before it."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "spent.json"
        self._before = 0.0
        if self._file.exists():
            self._before = float(json.loads(self._file.read_text("utf-8")))
        elif next(_files(directory), None) is not None:
            # Text without a record is from before there was one, and is whole.
            self._before = math.inf
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    def note(self) -> None:
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(round(self.seconds, 1)), "utf-8")
        partial.replace(self._file)


def split_held_out(written: Written) -> tuple[Written, Written]:
    """Rows to train on, and rows to evaluate on.

    Raises:
        ConfigError: one of both has no answers.
    """
    train, held_out = written[~written.is_held_out], written[written.is_held_out]
    if not (train.is_answer[:, 2:].any() and held_out.is_answer[:, 2:].any()):
        raise ConfigError(
            f"num_rows is {len(written.token_ids)}, and they hold no answers to train on or to hold out; "
            "allowed: more rows, or longer ones"
        )
    return train, held_out


class DeviceRows:
    """Rows of text on a device, as pairs of token ids and whether each is of an answer, ``[n, row_len]``."""

    def __init__(self, written: Written, device: torch.device) -> None:
        self._ids = torch.from_numpy(written.token_ids.astype(np.int32)).to(device)
        self._is_answer = torch.from_numpy(written.is_answer).to(device)

    def picked(self, cursor: int, count: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Some rows of an endless seeded shuffle, from place ``cursor`` on."""
        picked: list[int] = []
        num_rows = len(self._ids)
        while len(picked) < count:
            epoch, place = divmod(cursor + len(picked), num_rows)
            order = np.random.default_rng((seed, epoch)).permutation(num_rows)
            picked += order[place : place + count - len(picked)].tolist()
        rows = torch.tensor(picked, device=self._ids.device)
        return self._ids[rows].long(), self._is_answer[rows]

    def split(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        parts = (torch.split(part, size) for part in (self._ids, self._is_answer))
        for ids, is_answer in zip(*parts, strict=True):
            yield ids.long(), is_answer


def _check_source(directory: Path, model: Any, config: TextConfig) -> None:
    """Notes what the text of a directory is written by. Raises ConfigError if what is there has another."""
    prompts = None
    if config.prompts is not None:
        prompts = hashlib.sha256(Path(config.prompts).read_bytes()).hexdigest()
    own = {
        "by another target": _digest(model),
        "with another --prompts": prompts,
        "with another --mix": config.mix,
        "with another --chat": config.asks,
    }
    file = directory / "source.json"
    if file.exists() and next(_files(directory), None) is not None:
        kept = json.loads(file.read_text("utf-8"))
        for name, value in own.items():
            if kept.get(name) != value:
                raise ConfigError(
                    f"{str(directory)!r} holds text that was written {name}; allowed: the same, or another "
                    "--work-dir"
                )
    file.write_text(json.dumps(own, indent=1), "utf-8")


def _digest(model: Any) -> str:
    """SHA-256 of the first numbers of each parameter, in bfloat16, whatever type they are loaded in."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        # Numbers of each parameter by which targets are told apart.
        first = parameter.detach().flatten()[:1024].to("cpu", torch.bfloat16)
        digest.update(first.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _TextSource:
    """What the text of a run begins with."""

    def __init__(
        self, tokenizer: Any, work_dir: Path, config: TextConfig, markers: TurnMarkers | None
    ) -> None:
        self.markers = markers if config.asks else None
        self._tokenizer = tokenizer
        self._config = config
        self._opening = _plain_opening(tokenizer)
        self._ask = _asker(tokenizer) if markers is None and config.asks else None
        self._mix = None if config.mix is None else parse_mix(config.mix)
        self._prompts = None if config.prompts is None else self._read(Path(config.prompts))
        domains = self._mix or ({} if self._prompts else OWN_MIX)
        self._passages = _passages(work_dir / "passages.json") if OWN_MIX.keys() & domains else []
        # What is wrong with the mix is said before anything is written.
        self.beginnings(0)

    def beginnings(self, index: int) -> Beginnings:
        """The beginnings of a batch."""
        return Beginnings(
            self.markers,
            self._encode,
            self._passages,
            seed=self._config.seed + index,
            opening=self._opening,
            ask=self._ask,
            prompts=self._prompts,
            mix=self._mix,
            max_passage_len=self._config.row_len // 2,
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _read(self, path: Path) -> Prompts:
        """The prompts that leave half of a row to the answer."""
        found: dict[str, Sequence[tuple[int, ...]]] = {}
        room = self._config.row_len // 2
        for domain, texts in read_prompts(path).items():
            asked = [self._asked(text) for text in texts]
            found[domain] = [ids for ids in asked if len(ids) <= room]
            if num_long := len(asked) - len(found[domain]):
                _log.warning("%d prompts of %s have more than %d tokens: left out", num_long, domain, room)
        return split_prompts(found, seed=self._config.seed)

    def _asked(self, text: str) -> tuple[int, ...]:
        if self.markers is not None:
            return (*self.markers.opening, *self._encode(text), *self.markers.to_assistant)
        return (*self._opening, *self._encode(text)) if self._ask is None else tuple(self._ask(text))


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
    """The passages of the first call, so that a run that goes on elsewhere reads the same."""
    if not file.exists():
        _log.info("collecting passages from the Python files that are installed here")
        texts = passages_of(training_files(CorpusConfig(max_source_bytes=1_000_000)))
        file.write_text(json.dumps(texts), "utf-8")
    passages: list[str] = json.loads(file.read_text("utf-8"))
    return passages


def _files(directory: Path) -> Iterator[Path]:
    return iter(sorted(directory.glob("[0-9]*[0-9].npz")))


def _batches(directory: Path) -> Iterator[Written]:
    for file in _files(directory):
        saved = np.load(file)
        yield Written(**{field.name: saved[field.name] for field in fields(Written)})


def _joined(batches: Sequence[Written], directory: Path, row_len: int) -> Written:
    lengths = {batch.token_ids.shape[1] for batch in batches}
    if lengths != {row_len}:
        raise ConfigError(
            f"row_len is {row_len}, but {str(directory)!r} holds rows of {sorted(lengths)} tokens; allowed: "
            "that length, or another directory"
        )
    return Written(
        **{
            field.name: np.concatenate([getattr(batch, field.name) for batch in batches])
            for field in fields(Written)
        }
    )
