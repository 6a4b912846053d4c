"""Writes the report of a run: all of it as JSON, and the comparisons as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Report = dict[str, Any]


def write_report(report: Report, directory: Path) -> None:
    """Writes ``report.json`` and ``report.md``."""
    (directory / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (directory / "report.md").write_text("\n".join(_markdown(report)) + "\n", encoding="utf-8")


def problems(report: Report) -> list[str]:
    """Lists stages without a result, and float32 outputs that differ."""
    found = [f"{failure['stage']} failed: {failure['reason']}" for failure in report["failures"]]
    for name in report.get("sampling", {}).get("differing", ()):
        found.append(f"sampling, {name}: other tokens than a CPU's")
    for name, state in report.get("attention", {}).get("kernels", {}).items():
        if "numbers are off" in state:
            found.append(f"attention, {name}: {state.splitlines()[0]}")
    proposals = [
        report.get("proposals", {}),
        *(each.get("proposals", {}) for each in report["shapes"].values()),
    ]
    for time in (time for each in proposals for time in each.get("times", ())):
        # With fewer bits two ways to the same logits may differ.
        if report["options"].get("dtype") == "float32" and time["num_equal"] < time["num_proposals"]:
            found.append(
                f"proposals, {time['sampling']}, {time['num_sequences']} sequences, {time['num_tokens']} "
                f"draft tokens: {time['num_equal']} of {time['num_proposals']} of the loop equal those of "
                "steps"
            )
    for shape, results in report["shapes"].items():
        pair = results.get("pair float32")
        if pair is None:
            continue
        for entry in pair["agreements"]:
            if entry["num_equal"] != entry["num_outputs"]:
                found.append(
                    f"{shape}, float32, temperature {entry['temperature']:g}: {entry['arm']} gives "
                    f"{entry['num_equal']} of {entry['num_outputs']} outputs of plain decoding"
                )
        peer = results.get("transformers float32")
        if peer is not None and (equal := _num_equal(pair, peer)) < len(peer["greedy"]):
            found.append(
                f"{shape}, float32: {equal} of {len(peer['greedy'])} greedy outputs equal transformers'"
            )
    return found


def _num_equal(pair: dict[str, Any], peer: dict[str, Any]) -> int:
    return sum(ours == theirs for ours, theirs in zip(pair["greedy"], peer["greedy"], strict=True))


def _markdown(report: Report) -> Iterator[str]:
    options = report["options"]
    yield "# specray on an accelerator"
    yield ""
    yield f"`{json.dumps(options)}`"
    if "sampling" in report:
        yield from _sampling(report["sampling"])
    if "attention" in report:
        yield from _attention(report["attention"])
    if "proposals" in report:
        yield from _proposals(report["proposals"])
    for shape, results in report["shapes"].items():
        yield ""
        yield f"## {shape}"
        yield from _checkpoint(results)
        yield from _summary(results, options.get("dtype"))
        if "forwards" in results:
            yield from _forwards(results["forwards"])
        if "proposals" in results:
            yield from _proposals(results["proposals"])
        for dtype in ("float32", "bfloat16"):
            yield from _pair(dtype, results.get(f"pair {dtype}"), results.get(f"transformers {dtype}"))
    if report["failures"]:
        yield ""
        yield "## Failed"
        yield ""
        for failure in report["failures"]:
            yield f"- {failure['stage']}: {failure['reason'].splitlines()[-1]}"


def _sampling(sampling: dict[str, Any]) -> Iterator[str]:
    num_equal = sampling["num_kinds"] - len(sampling["differing"])
    yield ""
    yield "## Sampling"
    yield ""
    yield (
        f"Vocabulary of {sampling['vocab_size']}, {sampling['num_drafts']} draft tokens, "
        f"`{sampling['kernels']}`. Tokens equal a CPU's in {num_equal} of {sampling['num_kinds']} kinds."
    )
    yield ""
    yield from _table(
        ("step", "sampling", "sequences", "rows", "ms"),
        [
            (
                time["kind"],
                time["sampling"],
                str(time["num_sequences"]),
                str(time["num_rows"]),
                f"{time['ms']:.3f}",
            )
            for time in sampling["times"]
        ],
    )
    yield ""
    yield from _table(
        ("kernel", "rows", "ms"),
        [(time["kernel"], str(time["num_rows"]), f"{time['ms']:.3f}") for time in sampling["kernel_times"]],
    )


def _attention(attention: dict[str, Any]) -> Iterator[str]:
    heads = attention["heads"]
    yield ""
    yield "## Attention"
    yield ""
    yield (
        f"One layer of {heads['num_heads']} query and {heads['num_kv_heads']} kv heads of "
        f"{heads['head_dim']} numbers. The bound is a copy of as many bytes as K/V have."
    )
    for name, state in attention["kernels"].items():
        if state != "equal":
            yield ""
            yield f"`{name}` was not measured: {state.splitlines()[0]}"
    if attention["chosen"]:
        chosen = ", ".join(f"{shape} {name}" for shape, name in attention["chosen"].items())
        yield ""
        yield f"Chosen at a start, by sequences x rows: {chosen}."
    yield ""
    yield from _table(
        ("kernel", "sequences", "rows each", "tokens before", "us", "bound us"),
        [
            (
                time["kernel"],
                str(time["num_sequences"]),
                f"{time['num_rows']}{' (tree)' * time['is_tree']}",
                str(time["context_len"]),
                f"{time['us']:.1f}",
                f"{time['bound_us']:.1f}",
            )
            for time in attention["times"]
        ],
    )


def _proposals(proposals: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "## Proposals"
    yield ""
    yield (
        f"Draft `{proposals['model']}`: told step by step, and as one piece of captured work. The bound is "
        "its linear layers alone."
    )
    if captures := proposals.get("captures"):
        yield ""
        yield (
            f"{captures['num_captured']} of {captures['num_shapes']} shapes captured in "
            f"{captures['seconds']:.1f} s; an engine takes at most {captures['limit_s']:g} s at its start."
        )
    yield ""
    yield from _table(
        ("sampling", "sequences", "draft tokens", "steps ms", "loop ms", "bound ms", "bound share", "equal"),
        [
            (
                time["sampling"],
                str(time["num_sequences"]),
                str(time["num_tokens"]),
                f"{time['steps_ms']:.3f}",
                f"{time['loop_ms']:.3f}",
                f"{time['bound_ms']:.3f}",
                f"{time['bound_ms'] / time['loop_ms']:.2f}",
                f"{time['num_equal']} of {time['num_proposals']}",
            )
            for time in proposals["times"]
        ],
    )


def _checkpoint(results: dict[str, Any]) -> Iterator[str]:
    made = results.get("checkpoint")
    if made is None:
        return
    cuda = "" if made["cuda"] is None else f", CUDA {made['cuda']}"
    yield ""
    yield f"{made['device']}; torch {made['torch']}{cuda}, transformers {made['transformers']}."


def _summary(results: dict[str, Any], dtype: str | None) -> Iterator[str]:
    """Summarizes greedy decoding of one request: against the bound, plain decoding and transformers."""
    pair, peer = results.get(f"pair {dtype}"), results.get(f"transformers {dtype}")
    if pair is None:
        return
    greedy = {arm["arm"]: arm["tokens_per_s"] for arm in pair["arms"] if arm["temperature"] == 0}
    plain = greedy["off"]
    yield ""
    if "forwards" in results:
        bound = 1e3 / next(
            time["bound_ms"]
            for time in results["forwards"]["times"]
            if (time["num_sequences"], time["width"]) == (1, 1)
        )
        yield (
            f"- Plain decoding over gRPC: {plain:.1f} tokens/s, {plain / bound:.2f} of the {bound:.1f} that "
            "the linear layers alone allow"
        )
    for kind in ("serial", "enumerate", "auto"):
        arms = {name: speed for name, speed in greedy.items() if name.startswith(kind)}
        if arms:
            name = max(arms, key=arms.__getitem__)
            yield f"- {name}: {arms[name]:.1f} tokens/s, {arms[name] / plain:.2f} times plain"
    if peer is not None:
        for arm in peer["arms"]:
            yield (
                f"- transformers, {arm['arm']}: {arm['tokens_per_s']:.1f} tokens/s; specray's best is "
                f"{max(greedy.values()) / arm['tokens_per_s']:.2f} times that"
            )


def _forwards(forwards: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield (
        f"Weights: {forwards['weight_bytes'] / 1e9:.2f} GB, read by the linear layers alone at "
        f"{forwards['weights_gb_per_s']:.0f} GB/s; a copy moves {forwards['copy_gb_per_s']:.0f} GB/s. "
        f"Blocks of {forwards['block_size']} tokens; attention by default: {forwards['default_attention']}."
    )
    for name, state in forwards["attentions"].items():
        if state != "measured":
            yield ""
            yield f"`{name}` was not measured: {state.splitlines()[0]}"
    yield ""
    rows = [
        (
            time["attention"],
            "captured" if time["is_captured"] else "as it is",
            str(time["num_sequences"]),
            str(time["width"]),
            f"{time['forward_ms']:.3f}",
            f"{time['bound_ms']:.3f}",
            f"{time['share']:.2f}",
        )
        for time in forwards["times"]
    ]
    headings = ("attention", "forward", "sequences", "rows each", "ms", "bound ms", "bound share")
    yield from _table(headings, rows)
    yield ""
    first = forwards["verifies"][0]
    yield (
        f"What verdicts over a vocabulary of {first['vocab_size']} add to a forward with "
        f"{first['num_drafts']} draft tokens a sequence:"
    )
    yield ""
    added = [
        (
            time["sampling"],
            str(time["num_sequences"]),
            f"{time['forward_ms']:.3f}",
            f"{time['verify_ms']:.3f}",
            f"{time['added_share']:+.1%}",
        )
        for time in forwards["verifies"]
    ]
    yield from _table(("sampling", "sequences", "forward ms", "with verdicts ms", "added"), added)


def _pair(dtype: str, pair: dict[str, Any] | None, peer: dict[str, Any] | None) -> Iterator[str]:
    if pair is not None:
        yield ""
        yield f"### Draft and target over gRPC, {dtype}"
        yield ""
        agreements = {(entry["arm"], entry["temperature"]): entry for entry in pair["agreements"]}
        plain = {arm["temperature"]: arm["tokens_per_s"] for arm in pair["arms"] if arm["arm"] == "off"}
        rows = [
            (
                arm["arm"],
                f"{arm['temperature']:g}",
                f"{arm['tokens_per_s']:.1f}",
                f"{arm['tokens_per_s'] / plain[arm['temperature']]:.2f}",
                _number(arm["acceptance_rate"]),
                _number(arm["hit_rate"]),
                _number(arm["verify_ms"]),
                _number(arm["draft_ms"]),
                *_agreement(agreements.get((arm["arm"], arm["temperature"]))),
            )
            for arm in pair["arms"]
        ]
        headings = ("arm", "temp.", "tokens/s", "of plain", "accepted", "hits", "verify ms", "draft ms")
        yield from _table((*headings, "equal outputs", "divergences per token"), rows)
        for arm in pair["arms"]:
            if "auto" in arm["arm"]:
                chosen = ", ".join(f"{plan} {share:.0%}" for plan, share in arm["plans"].items())
                yield f"\nPlans of {arm['arm']} at temperature {arm['temperature']:g}: {chosen}."
    if peer is not None:
        yield ""
        yield f"### transformers, {dtype}"
        yield ""
        yield from _table(
            ("arm", "tokens/s"), [(arm["arm"], f"{arm['tokens_per_s']:.1f}") for arm in peer["arms"]]
        )
        if pair is not None:
            yield ""
            equal = _num_equal(pair, peer)
            total = len(pair["greedy"])
            yield f"Outputs of plain decoding equal to transformers', greedy: {equal} of {total}."


def _agreement(entry: dict[str, Any] | None) -> tuple[str, str]:
    if entry is None:
        return "–", "–"
    return f"{entry['num_equal']} of {entry['num_outputs']}", f"{entry['divergence_rate']:.5f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
