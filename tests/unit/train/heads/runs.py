"""Tiny targets and short runs, for tests of heads in training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from specray.config import Config, DraftConfig
from specray.engine.build import build_draft_engine
from specray.train.draft.text import TextConfig
from specray.train.heads.methods import Block, Eagle3, Medusa, Method, Pard, PEagle
from specray.train.heads.trainer import StepConfig
from specray.train.heads.training import HeadTrainConfig
from specray.train.loop import RunLimit
from specray.types import Proposal, SpeculateItem
from tests.unit.engine.features.targets import GREEDY
from tests.unit.train.toys import save_model, save_toy_tokenizer, toy_llama

ROW_LEN = 112


def write_target(directory: Path) -> Path:
    """A random Llama of three layers, and a smaller one beside it as its draft.

    Without a chat template, so that it writes plain text.
    """
    tokenizer = directory / "tokenizer"
    save_toy_tokenizer(tokenizer)
    (tokenizer / "chat_template.jinja").unlink()
    save_model(varied_model(), tokenizer, directory / "target")
    draft = toy_llama(1, vocab_size=259, hidden_size=16, num_layers=2, intermediate_size=48)
    save_model(draft, tokenizer, directory / "draft")
    return directory / "target"


def varied_model() -> Any:
    """A random model that goes on with another token each time: tied and narrow, it would repeat one."""
    model = toy_llama(0, vocab_size=259, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=48)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.model.embed_tokens.weight))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def methods(pair: Path) -> dict[str, Method]:
    """Each method for the target of a pair, all with three places ahead."""
    spark = Block(num_depths=3, num_layers=2, has_confidence=True, anchor_share=0.3)
    return {
        "eagle3": Eagle3(num_depths=3, max_draft_vocabulary=200),
        "peagle": PEagle(num_depths=3, max_draft_vocabulary=200, keep_rate=0.6, min_kept=0.1),
        "medusa": Medusa(num_depths=3),
        "block": spark,
        "pard": Pard(str(pair / "draft"), num_depths=3, keep_rate=0.6, min_kept=0.1),
    }


def config(num_steps: int, *, seed: int = 0, rows_per_forward: int = 2) -> HeadTrainConfig:
    text = TextConfig(num_rows=24, rows_per_batch=12, row_len=ROW_LEN, seed=0)
    steps = StepConfig(rows_per_step=3, rows_per_forward=rows_per_forward, seed=seed)
    return HeadTrainConfig(RunLimit(num_steps=num_steps), text, steps)


def begin(work_dir: Path, *, text_of: Path | None = None) -> Path:
    """A run's directory, whose passages are there already: none are looked for.

    Args:
        text_of: directory of another run of the target, whose text is taken.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    if text_of is not None:
        shutil.copytree(text_of / "written", work_dir / "written")
    (work_dir / "passages.json").write_text(json.dumps(["some text to go on with. " * 40]), "utf-8")
    return work_dir


def target_model(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def held_out(work_dir: Path, method: str) -> list[dict[str, float]]:
    """The evaluations of a run's log."""
    rows = (work_dir / f"{method}.log.jsonl").read_text("utf-8").splitlines()
    return [row for row in map(json.loads, rows) if "held_out_loss" in row]


def proposals(
    draft: Path, prompt: Sequence[int], num_tokens: int
) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Four texts that grow by some accepted tokens and one more, and what the draft engine proposes after."""
    options = {"dtype": "float32", "num_threads": 1, "profile_s": 0, "max_model_len": 64, "max_num_seqs": 2}
    engine = build_draft_engine(Config(draft=DraftConfig(model=str(draft), **options)))
    tokens, num_sent = list(prompt), 0
    for round_id in range(4):
        new = tuple(tokens[num_sent:])
        item = SpeculateItem("a", round_id, num_sent, new, num_tokens, sampling=GREEDY)
        [proposal] = engine.speculate([item]).replies
        assert isinstance(proposal, Proposal)
        yield list(tokens), proposal.draft.token_ids
        num_sent = len(tokens)
        tokens += [*proposal.draft.token_ids[: round_id % 3], 40 + round_id]


def vary(module: nn.Module) -> None:
    """Gives every parameter numbers of its own; norms stay near 1."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
