"""The commands of ``specray train``: a method, its own options, and those that all share."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.cli.options import flattened
from specray.cli.train.options import HeadOptions, RunOptions

if TYPE_CHECKING:
    from specray.train.heads.methods import Method

app = typer.Typer(no_args_is_help=True, help="Train drafts and heads for a target.")

Target = Annotated[
    str,
    typer.Argument(
        help="Checkpoint directory, known name or hub id of any causal language model of transformers, or "
        "embedded."
    ),
]
Depths = Annotated[int, typer.Option(min=1, max=64, help="Draft tokens of one forward.")]
MaskToken = Annotated[
    int | None,
    typer.Option(
        help="Token id that stands for one to be drafted; default: one that the target does not write."
    ),
]
MaxVocabulary = Annotated[int, typer.Option(min=64, help="Ids that can be proposed, at most.")]


@app.callback()
def _group() -> None:
    """Train drafts and heads for a target."""


@app.command()
@flattened
def draft(
    target: Annotated[
        str, typer.Argument(help="Checkpoint directory or hub id of a model with a chat template.")
    ],
    options: RunOptions,
    max_vocabulary: MaxVocabulary = 12_288,
) -> None:
    """Train a small draft; what it writes is completed with the target's embedding when it is served."""
    from specray.train.draft.completion import complete_draft
    from specray.train.draft.training import DraftTrainConfig, train_draft
    from specray.train.loop import usable_device

    config = DraftTrainConfig(
        options.limit(),
        options.text(),
        rows_per_step=options.rows_per_step,
        rows_per_forward=options.rows_per_forward or 4,
        max_draft_vocabulary=max_vocabulary,
        loss=options.loss_config(),
        seed=options.seed,
    )
    device = usable_device(options.device)
    compact = train_draft(
        target,
        options.work_dir,
        config,
        device=device,
        has_bfloat16=has_bfloat16(device),
        adapt=options.adapt(),
    )
    typer.echo(f"wrote {compact}")
    if Path(target).is_dir():
        typer.echo(f"wrote {complete_draft(compact, Path(target), options.work_dir / 'complete')}")


@app.command()
@flattened
def eagle3(
    target: Target,
    options: HeadOptions,
    num_depths: Annotated[int, typer.Option(min=1, max=16, help="Tokens ahead that are trained.")] = 4,
    max_vocabulary: MaxVocabulary = 12_288,
    parallel: Annotated[
        bool, typer.Option("--parallel", help="Train it to draw all its tokens in one forward (P-EAGLE).")
    ] = False,
) -> None:
    """Train an EAGLE-3 head; what it writes is served with ``specray serve --target TARGET --drafter``."""
    from specray.train.heads.methods import Eagle3, PEagle

    method = PEagle if parallel else Eagle3
    _train_head(method(num_depths, max_draft_vocabulary=max_vocabulary), target, options)


@app.command()
@flattened
def medusa(
    target: Target,
    options: HeadOptions,
    num_heads: Annotated[int, typer.Option(min=1, max=16, help="Heads, one for each place ahead.")] = 4,
) -> None:
    """Train Medusa heads; what it writes is served with ``specray serve --target TARGET --drafter``."""
    from specray.train.heads.methods import Medusa

    _train_head(Medusa(num_heads), target, options)


@app.command()
@flattened
def block(
    target: Target,
    options: HeadOptions,
    num_depths: Depths = 7,
    num_layers: Annotated[int, typer.Option(min=1, max=32, help="Layers of the drafter.")] = 2,
    confidence: Annotated[
        bool, typer.Option("--confidence", help="Train a confidence head, too: the layout is then DSpark's.")
    ] = False,
    anchor_share: Annotated[
        float, typer.Option(min=0.001, max=1, help="Share of tokens behind which a step trains a block.")
    ] = 0.125,
    mask_token: MaskToken = None,
) -> None:
    """Train a block drafter (DFlash); it is served with ``specray serve --target TARGET --drafter``."""
    from specray.train.heads.methods import Block

    method = Block(num_depths, num_layers, confidence, anchor_share, mask_token)
    _train_head(method, target, options)


@app.command()
@flattened
def pard(
    target: Target,
    options: HeadOptions,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Draft model that it begins as, with the target's tokenizer: checkpoint directory, known "
            "name, hub id or embedded; default: the draft that the package has for the target."
        ),
    ] = None,
    num_depths: Depths = 8,
    keep_rate: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the masks of a place that the next one keeps.")
    ] = 0.7,
    min_kept: Annotated[
        float, typer.Option(min=0, max=1, help="Least share of tokens behind which a place is trained.")
    ] = 0.2,
    mask_token: MaskToken = None,
) -> None:
    """Train a draft to predict all draft tokens in one forward (PARD); it is served with ``--draft``."""
    from specray.train.heads.methods import Pard

    checkpoint = _own_draft(target) if draft is None else _checkpoint(draft, is_draft=True)
    method = Pard(checkpoint, num_depths, keep_rate, min_kept, mask_token)
    _train_head(method, target, options)


def _train_head(method: Method, target: str, options: HeadOptions) -> None:
    from specray.train.heads.trainer import StepConfig
    from specray.train.heads.training import HeadTrainConfig, train_head
    from specray.train.loop import usable_device

    device = usable_device(options.device)
    steps = StepConfig(
        options.rows_per_step,
        options.rows_per_forward or method.rows_per_forward,
        loss=options.loss_config(),
        seed=options.seed,
    )
    head = train_head(
        method,
        _checkpoint(target),
        options.work_dir,
        HeadTrainConfig(options.limit(), options.text(), steps, options.evaluate_every, options.readings_gib),
        device=device,
        has_bfloat16=has_bfloat16(device),
        adapt=options.adapt(),
        name=target,
        command=shlex.join(["specray", *sys.argv[1:]]),
    )
    typer.echo(f"wrote {head}")
    typer.echo(
        f"serve it: specray serve --target {target} {'--draft' if method.is_draft else '--drafter'} {head}"
    )


def has_bfloat16(device: str) -> bool:
    """Whether the processor multiplies bfloat16: products of a CPU without take several times as long."""
    from specray.engine.cpu.isa import Isa, usable_isas

    return device != "cpu" or bool({Isa.AMX, Isa.AVX512_BF16}.intersection(usable_isas()))


def _checkpoint(name: str, *, is_draft: bool = False) -> str:
    """What transformers loads for a model's name. Raises ConfigError where it cannot be had."""
    from specray.cli.models.checkpoints import plain_checkpoint
    from specray.config import EMBEDDED
    from specray.demo.paths import demo_draft_path, demo_target_path
    from specray.models.resolve import find_source

    if name == EMBEDDED:
        return str(demo_draft_path() if is_draft else demo_target_path())
    source = find_source(name)
    return name if source is None else str(plain_checkpoint(source))


def _own_draft(target: str) -> str:
    """The draft that the package has for a target. Raises ConfigError where it has none."""
    from specray.cli.models.fetching import fetch_listener
    from specray.config import EMBEDDED
    from specray.demo.paths import demo_draft_path
    from specray.errors import ConfigError
    from specray.models.cache import user_cache
    from specray.models.catalogue import KnownModel
    from specray.models.drafts import compact_draft, complete_draft
    from specray.models.resolve import find_source, source_checkpoint

    if target == EMBEDDED:
        return str(demo_draft_path())
    known = find_source(target)
    if isinstance(known, KnownModel) and known.draft is not None:
        return _checkpoint(known.draft.name, is_draft=True)
    if not isinstance(known, KnownModel) or compact_draft(known) is None:
        raise ConfigError(
            f"--draft is missing, and the package has no draft for {target!r}; allowed: a draft model with "
            "its tokenizer"
        )
    with fetch_listener() as listener:
        kept = source_checkpoint(known, user_cache(), listener)
        return str(complete_draft(known, kept, user_cache(), listener))
