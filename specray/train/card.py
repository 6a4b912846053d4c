"""Writes the model card of a pair from the records of its training run: no figure is typed by hand."""

import json
from pathlib import Path
from typing import Any

from specray.train.evaluate import PairEvaluation, SampleScores

_CARD = """# The embedded pair

Two small language models that complete Python code, shipped with specray so that it serves something
real without a model hub: a **target** ({target_parameters} parameters) and a **draft**
({draft_parameters} parameters) trained to agree with it. They are for trying and measuring speculative
decoding; what they write looks like Python and is rarely right.

Both are Llama models (`LlamaForCausalLM`, tied embeddings, bfloat16 safetensors) with one byte-level BPE
tokenizer of {vocab_size} tokens; texts begin with `<s>` and end with `</s>`. The chat template turns user
and system messages into comments and leaves the model to go on with code.

| | hidden | layers | MLP | heads | key/value heads | head dim | positions |
|---|---|---|---|---|---|---|---|
{shape_rows}

Trained on sequences of up to {trained_len} tokens; later positions are allowed but were not trained.

## Results

{results}

Greedy agreement is the share of positions at which the draft's most likely token is the target's. The
continuations are of the first {prompt_lens} tokens of held-out files, {continuation_len} tokens each,
written by the target itself. Overlap is the mean of sum(min(target_probs, draft_probs)), the acceptance
rate of rejection sampling at temperature 1. Measured in bfloat16 on CPU by `specray models evaluate`,
which reads the held-out files that the environment has at that time: {evaluated_files} here.

## Training

    {command}

Seeds: target {target_seed}, draft {draft_seed}. The target's schedule {target_limit}, the draft's
{draft_limit}. Runs that follow the clock are resumable but not repeatable to the bit (`--target-steps`
and `--draft-steps` are); interrupted calls were resumed with the same state, samples included. Tokens
per second are those of wall time, on CPU cores that other programs used as well.

| | steps | tokens | wall time | tokens/s |
|---|---|---|---|---|
{run_rows}

- Target: next-token prediction. Muon on matrices, AdamW on embeddings and norms, float32 master weights,
  linear decay to {final_fraction} of the peak; sequences of {sequence_lens} tokens in turn,
  {target_batch} tokens a step.
- Draft: Kullback-Leibler divergence to the target's distribution plus {argmax_weight} times the
  cross-entropy on the target's argmax; half on real text, half on {num_rows} rows of {row_len} tokens
  that begin with training text and that the target continued at temperatures {temperatures}. Its
  embeddings start from the principal directions of the target's.

## Data

Python source of the interpreter's standard library and of the installed packages whose metadata name a
permissive licence (MIT, BSD, Apache-2.0, PSF: `specray/train/corpus.py`), without tests and vendored
copies, deduplicated, at most {max_source_mb} MB of each package: {train_files} files, {train_mb} MB,
{train_tokens} tokens. One file in {holdout_modulus}, chosen by the hash of its path, is held out:
{held_out_files} files, {held_out_tokens} tokens. The sources and their licences:

| source | version | licence | files | bytes |
|---|---|---|---|---|
{source_rows}
"""


def write_card(
    work_dir: Path, path: Path, *, config: dict[str, Any], evaluation: PairEvaluation, command: str
) -> None:
    """Writes the card from the corpus summary, the logs and checkpoints in `work_dir` and the evaluation.

    `config` is the run's `PairTrainConfig` as a dictionary.
    """
    corpus = _read_json(work_dir / "corpus.json")
    shapes = {name: config[name]["shape"] for name in ("target", "draft")}
    target, draft = config["target"], config["draft"]
    text = _CARD.format(
        target_parameters=_count_parameters(shapes["target"]),
        draft_parameters=_count_parameters(shapes["draft"]),
        vocab_size=shapes["target"]["vocab_size"],
        shape_rows="\n".join(_shape_row(name, shape) for name, shape in shapes.items()),
        trained_len=max(length for _, length in target["sequence_lens"]),
        sequence_lens=_join(length for _, length in target["sequence_lens"]),
        results=_results(evaluation),
        continuation_len=config["evaluate"]["continuation_len"],
        prompt_lens=_join(config["evaluate"]["prompt_lens"]),
        command=command,
        evaluated_files=evaluation.held_out_text.num_files,
        target_seed=target["seed"],
        draft_seed=draft["seed"],
        target_limit=_describe_limit(target["limit"]),
        draft_limit=_describe_limit(draft["limit"]),
        run_rows="\n".join(_run_row(name, work_dir / f"{name}.log.jsonl") for name in ("target", "draft")),
        final_fraction=target["optimizer"]["final_fraction"],
        target_batch=target["windows_per_step"] * target["window_len"],
        argmax_weight=draft["argmax_weight"],
        num_rows=sum(1 for _ in (work_dir / "samples").glob("[0-9]*[0-9].npy"))
        * config["samples"]["batch_size"],
        row_len=config["samples"]["row_len"],
        temperatures=_join(sorted(set(config["samples"]["temperatures"]))),
        max_source_mb=config["corpus"]["max_source_bytes"] / 1e6,
        holdout_modulus=config["corpus"]["holdout_modulus"],
        train_files=corpus["train_num_files"],
        train_mb=round(corpus["train_num_bytes"] / 1e6, 1),
        train_tokens=_thousands(corpus["train_num_tokens"]),
        held_out_files=corpus["held_out_num_files"],
        held_out_tokens=_thousands(corpus["held_out_num_tokens"]),
        source_rows="\n".join(_source_row(source) for source in corpus["sources"]),
    )
    path.write_text(text)


def _num_sampled_rows(work_dir: Path, config: dict[str, Any]) -> int:
    batches = [file for file in (work_dir / "samples").glob("*.npy") if ".partial" not in file.name]
    return len(batches) * int(config["samples"]["batch_size"])


def _results(evaluation: PairEvaluation) -> str:
    text = evaluation.held_out_text
    rows = [
        "| held-out text | target | draft |",
        "|---|---|---|",
        f"| loss, nats per token | {text.target_loss:.3f} | {text.draft_loss:.3f} |",
        f"| bits per byte | {text.target_bits_per_byte:.3f} | {text.draft_bits_per_byte:.3f} |",
        "",
        "| draft against target | positions | greedy agreement | overlap |",
        "|---|---|---|---|",
        _sample_row("target's greedy continuations", evaluation.greedy_samples),
        _sample_row("target's continuations at temperature 1", evaluation.temperature_1_samples),
        f"| held-out text | {text.num_tokens} | {text.agreement:.3f} | |",
    ]
    return "\n".join(rows)


def _sample_row(name: str, scores: SampleScores) -> str:
    return f"| {name} | {scores.num_positions} | {scores.agreement:.3f} | {scores.overlap:.3f} |"


def _shape_row(name: str, shape: dict[str, int]) -> str:
    fields = ("hidden_size", "num_layers", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    cells = [shape[field] for field in (*fields, "max_position_embeddings")]
    return f"| {name} | " + " | ".join(str(cell) for cell in cells) + " |"


def _count_parameters(shape: dict[str, int]) -> str:
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    attention = 2 * hidden * head_dim * (shape["num_heads"] + shape["num_kv_heads"])
    layer = attention + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    total = shape["vocab_size"] * hidden + shape["num_layers"] * layer + hidden
    return f"{total / 1e6:.2f} million"


def _describe_limit(limit: dict[str, Any]) -> str:
    if limit["num_steps"] is not None:
        return f"ends after {limit['num_steps']} steps"
    return f"follows the clock and ends after {limit['time_budget_s']:.0f} s"


def _run_row(name: str, log: Path) -> str:
    last = json.loads(log.read_text().splitlines()[-1])
    cells = (last["step"], _thousands(last["num_tokens"]), f"{last['elapsed_s']:.0f} s", last["tokens_per_s"])
    return f"| {name} | " + " | ".join(str(cell) for cell in cells) + " |"


def _source_row(source: dict[str, Any]) -> str:
    cells = (source[field] for field in ("source", "version", "license", "num_files", "num_bytes"))
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _join(values: Any) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _thousands(count: int) -> str:
    return f"{count:,}"


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())
