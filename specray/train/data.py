"""Stores token streams on disk and cuts training batches from them, reproducibly from (seed, cursor)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from specray.train.corpus import Corpus, CorpusConfig, load_corpus
from specray.train.tokenizer import encode_files, load_tokenizer, save_tokenizer, train_tokenizer

Tokens = npt.NDArray[np.uint16]

_TRAIN_FILE = "train.npy"
_HELD_OUT_FILE = "held_out.npy"
_SUMMARY_FILE = "corpus.json"


@dataclass(frozen=True, slots=True)
class PreparedData:
    """Token ids of the corpus: documents one after another, each `<s>` text `</s>`."""

    train: Tokens
    held_out: Tokens


def prepare_data(
    work_dir: Path,
    *,
    corpus_config: CorpusConfig | None = None,
    vocab_size: int = 4096,
    max_position_embeddings: int = 2048,
) -> PreparedData:
    """Reads the corpus, trains the tokenizer and encodes; what lies in `work_dir` from before is reused."""
    if not (work_dir / _SUMMARY_FILE).exists():
        work_dir.mkdir(parents=True, exist_ok=True)
        corpus = load_corpus(corpus_config)
        tokenizer = train_tokenizer((file.text for file in corpus.train), vocab_size=vocab_size)
        save_tokenizer(tokenizer, tokenizer_dir(work_dir), model_max_length=max_position_embeddings)
        _write_tokens(work_dir, corpus)
    return load_prepared(work_dir)


def load_prepared(work_dir: Path) -> PreparedData:
    """Opens what `prepare_data` wrote; raises FileNotFoundError when it has not run."""
    return PreparedData(
        train=np.load(work_dir / _TRAIN_FILE, mmap_mode="r"), held_out=np.load(work_dir / _HELD_OUT_FILE)
    )


def tokenizer_dir(work_dir: Path) -> Path:
    return work_dir / "tokenizer"


def window_batch(
    tokens: Tokens, *, seed: int, cursor: int, num_windows: int, window_len: int
) -> torch.Tensor:
    """Windows `cursor .. cursor + num_windows` of an endless, seeded shuffle of the stream.

    Each epoch cuts the stream at another offset and visits every window once.
    Returns int64 [num_windows, window_len + 1]: inputs and, one to the right, their targets.
    """
    windows_per_epoch = (len(tokens) - 1) // window_len - 1
    if windows_per_epoch < 1:
        raise ValueError(f"{len(tokens)} tokens are too few for windows of {window_len}")
    rows = []
    order: npt.NDArray[np.int64] | None = None
    offset = epoch = -1
    for index in range(cursor, cursor + num_windows):
        if index // windows_per_epoch != epoch or order is None:
            epoch = index // windows_per_epoch
            generator = np.random.default_rng((seed, epoch))
            order = generator.permutation(windows_per_epoch)
            offset = int(generator.integers(window_len))
        start = offset + int(order[index % windows_per_epoch]) * window_len
        rows.append(np.asarray(tokens[start : start + window_len + 1], dtype=np.int64))
    return torch.from_numpy(np.stack(rows))


def split_windows(windows: torch.Tensor, sequence_len: int) -> torch.Tensor:
    """[n, window_len + 1] -> [n * window_len / sequence_len, sequence_len + 1]; neighbours share a token."""
    return windows.unfold(1, sequence_len + 1, sequence_len).reshape(-1, sequence_len + 1)


def _write_tokens(work_dir: Path, corpus: Corpus) -> None:
    tokenizer = load_tokenizer(tokenizer_dir(work_dir))
    train = [
        np.array(ids, np.uint16) for ids in encode_files(tokenizer, (file.text for file in corpus.train))
    ]
    # Neighbours in the stream share windows; a fixed shuffle keeps one package's files apart.
    order = np.random.default_rng(0).permutation(len(train))
    held_out = [
        np.array(ids, np.uint16) for ids in encode_files(tokenizer, (f.text for f in corpus.held_out))
    ]
    np.save(work_dir / _TRAIN_FILE, np.concatenate([train[i] for i in order]))
    np.save(work_dir / _HELD_OUT_FILE, np.concatenate(held_out))
    summary = {
        "sources": [asdict(source) for source in corpus.sources],
        "train_num_files": len(corpus.train),
        "train_num_bytes": sum(len(file.text.encode()) for file in corpus.train),
        "train_num_tokens": sum(len(ids) for ids in train),
        "held_out_num_files": len(corpus.held_out),
        "held_out_num_bytes": sum(len(file.text.encode()) for file in corpus.held_out),
        "held_out_num_tokens": sum(len(ids) for ids in held_out),
        "held_out_files": [file.key for file in corpus.held_out],
    }
    partial = work_dir / (_SUMMARY_FILE + ".partial")
    partial.write_text(json.dumps(summary, indent=1))
    partial.rename(work_dir / _SUMMARY_FILE)
