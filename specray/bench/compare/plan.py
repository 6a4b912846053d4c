"""What a comparison of servers is asked for. Its fields are the options of ``specray bench compare``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.core.options import FreshPrompts, IsChat, NumTurns, PromptSourceOptions, RequestTimeout

COMPARE_ARMS = (
    *("specray:plain", "specray:serial", "specray:auto"),
    *("transformers:plain", "transformers:draft:4", "transformers:ngram:4"),
    *("vllm:plain", "vllm:draft:4", "vllm:draft:8", "vllm:ngram:4"),
    *("llama.cpp:plain", "llama.cpp:draft:4", "llama.cpp:draft:8", "llama.cpp:ngram:4"),
)
_ARM_HELP = (
    f"SYSTEM:MODE[:K][@WEIGHTS]; may be repeated. Default: {', '.join(COMPARE_ARMS)}. More: specray:ahead, "
    "specray:enumerate, specray:ngram, specray:suffix, vllm:draft-probabilistic. Weights: bfloat16 if none, "
    "int8 and int4 of specray, gguf of specray and llama.cpp: a file's own bits (--target or --gguf)."
)
Checkpoint = Annotated[
    str, typer.Option(help="Checkpoint directory, GGUF file, name of a known model, or embedded.")
]


@dataclass(frozen=True, slots=True)
class ComparePlan(PromptSourceOptions):
    """Several servers over the same prompts, in turns."""

    target: Checkpoint = "embedded"
    draft: Checkpoint = "embedded"
    vllm_python: Annotated[
        Path | None, typer.Option(help="Python interpreter of an environment with vLLM.")
    ] = None
    llama_cpp: Annotated[
        Path | None, typer.Option(help="Source directory of llama.cpp, which is built in its build/.")
    ] = None
    gguf: Annotated[Path | None, typer.Option(help="GGUF file of the target, for llama.cpp:MODE@gguf.")] = (
        None
    )
    arm: Annotated[list[str] | None, typer.Option(help=_ARM_HELP)] = None
    chat: IsChat = False
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at a time; may be repeated. Default: 1 4 8 16 32."),
    ] = None
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0, max=2, help="Sampling temperature; may be repeated. Default: 0 0.7 1."),
    ] = None
    num_turns: NumTurns = 2
    num_prompts: Annotated[int, typer.Option(min=1, help="Minimum requests per pass.")] = 4
    max_tokens: Annotated[int, typer.Option(min=2, help="Output tokens per prompt.")] = 128
    num_warmup: Annotated[
        int, typer.Option(min=1, help="Requests after each start that are not counted; a burst follows them.")
    ] = 2
    fresh_prompts: FreshPrompts = True
    num_threads: Annotated[
        int, typer.Option(min=1, help="CPU threads of every target; default: all cores.")
    ] = os.cpu_count() or 1
    max_model_len: Annotated[int, typer.Option(min=32, help="Maximum tokens of a sequence.")] = 1024
    start_timeout_s: Annotated[
        float, typer.Option(min=1, help="Seconds allowed for the start of a server.")
    ] = 600.0
    timeout_s: RequestTimeout = 600.0
    time_limit_s: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds after which no server is started any more; run again to go on.",
            show_default=False,
        ),
    ] = float("inf")

    @property
    def concurrencies(self) -> list[int]:
        return sorted(set(self.concurrency or (1, 4, 8, 16, 32)))

    @property
    def temperatures(self) -> list[float]:
        return sorted(set(self.temperature or (0.0, 0.7, 1.0)))
