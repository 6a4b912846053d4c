"""Writes the report of a run: all of it as JSON, and the comparisons as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specray.bench.core.report import DASH, markdown_table, number, table_of

Report = dict[str, Any]
Row = dict[str, Any]
_DIGITS = {"ms": 3, "us": 1, "s": 1, "share": 3}
"""Digits of figures by the end of their names; two for all others."""


def write_report(report: Report, directory: Path) -> None:
    """Writes ``report.json`` and ``report.md``."""
    (directory / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (directory / "report.md").write_text("\n\n".join(_parts(report)) + "\n", encoding="utf-8")


def problems(report: Report) -> list[str]:
    """Lists stages without a result, and float32 outputs that differ."""
    found = [f"{failure['stage']} failed: {failure['reason']}" for failure in report["failures"]]
    for name in report.get("sampling", {}).get("differing", ()):
        found.append(f"sampling, {name}: other tokens than a CPU's")
    for name, state in report.get("attention", {}).get("kernels", {}).items():
        if "numbers are off" in state:
            found.append(f"attention, {name}: {state.splitlines()[0]}")
    for name, state in report.get("products", {}).get("formats", {}).items():
        if "wrong on this device" in state:
            found.append(f"products, {name}: {state}")
    for shape, results in report["shapes"].items():
        found += [
            f"{shape}, deterministic, {time['num_sequences']} sequences: {time['on_equal']} of "
            f"{time['width']} rows have the bits of rows that come one by one"
            for time in results.get("determinism", {}).get("times", ())
            if time["on_equal"] < time["width"]
        ]
    if report["options"].get("dtype") == "float32":
        # With fewer bits two ways to the same logits may differ.
        of_all = [report, *report["shapes"].values()]
        found += [
            f"proposals, {time['sampling']}, {time['num_sequences']} sequences, {time['num_tokens']} draft "
            f"tokens: {time['num_equal']} of {time['num_proposals']} of the loop equal those of steps"
            for each in of_all
            for time in each.get("proposals", {}).get("times", ())
            if time["num_equal"] < time["num_proposals"]
        ]
    for shape, results in report["shapes"].items():
        pair, peer = results.get("pair float32"), results.get("transformers float32")
        if pair is None:
            continue
        found += [
            f"{shape}, float32, temperature {entry['temperature']:g}: {entry['arm']} gives "
            f"{entry['num_equal']} of {entry['num_outputs']} outputs of plain decoding"
            for entry in pair["agreements"]
            if entry["num_equal"] != entry["num_outputs"]
        ]
        if peer is not None and (equal := _num_equal(pair, peer)) < len(peer["greedy"]):
            found.append(
                f"{shape}, float32: {equal} of {len(peer['greedy'])} greedy outputs equal transformers'"
            )
    return found


def _num_equal(pair: Row, peer: Row) -> int:
    return sum(ours == theirs for ours, theirs in zip(pair["greedy"], peer["greedy"], strict=True))


def _parts(report: Report) -> Iterator[str]:
    options = report["options"]
    yield "# specray on an accelerator"
    yield f"`{json.dumps(options)}`"
    once = {
        "sampling": _sampling,
        "attention": _attention,
        "products": _products,
        "experts": _experts,
        "recurrent": _recurrent,
        "proposals": _proposals,
    }
    for name, parts in once.items():
        if name in report:
            yield from parts(report[name])
    for shape, results in report["shapes"].items():
        yield f"## {shape}"
        if made := results.get("checkpoint"):
            cuda = "" if made["cuda"] is None else f", CUDA {made['cuda']}"
            yield f"{made['device']}; torch {made['torch']}{cuda}, transformers {made['transformers']}."
        if summary := list(_summary(results, options.get("dtype"))):
            yield "\n".join(summary)
        if "forwards" in results:
            yield from _forwards(results["forwards"])
        if "determinism" in results:
            yield from _determinism(results["determinism"])
        if "proposals" in results:
            yield from _proposals(results["proposals"])
        for dtype in ("float32", "bfloat16"):
            yield from _pair(dtype, results.get(f"pair {dtype}"), results.get(f"transformers {dtype}"))
    if report["failures"]:
        yield "## Failed"
        lines = (f"- {each['stage']}: {each['reason'].splitlines()[-1]}" for each in report["failures"])
        yield "\n".join(lines)


def _sampling(sampling: Row) -> Iterator[str]:
    num_equal = sampling["num_kinds"] - len(sampling["differing"])
    yield "## Sampling"
    yield (
        f"Vocabulary of {sampling['vocab_size']}, {sampling['num_drafts']} draft tokens, "
        f"`{sampling['kernels']}`. Tokens equal a CPU's in {num_equal} of {sampling['num_kinds']} kinds."
    )
    yield _table(sampling["times"])
    yield _table(sampling["kernel_times"])


def _attention(attention: Row) -> Iterator[str]:
    heads = attention["heads"]
    yield "## Attention"
    yield (
        f"One layer of {heads['num_heads']} query and {heads['num_kv_heads']} kv heads of "
        f"{heads['head_dim']} numbers. The bound is a copy of as many bytes as K/V have."
    )
    yield from _left_out(attention["kernels"], "equal")
    if attention["chosen"]:
        chosen = ", ".join(f"{shape} {name}" for shape, name in attention["chosen"].items())
        yield f"Chosen at a start, by sequences x rows: {chosen}."
    yield _table(attention["times"])


def _products(products: Row) -> Iterator[str]:
    yield "## Products with weights in their own bits"
    yield "The bound is a copy of as many bytes as the weight has; fixed: one tile for any number of rows."
    yield from _left_out(products["formats"], "equal")
    yield _table(products["times"])


def _determinism(determinism: Row) -> Iterator[str]:
    yield (
        "What `target.deterministic: on` costs, and rows of a step whose logits have the bits of rows that "
        f"come one by one; attention with it: {determinism['attention']}."
    )
    yield _table(determinism["times"])


def _experts(experts: Row) -> Iterator[str]:
    sizes = experts["sizes"]
    yield "## Experts"
    yield (
        f"{sizes['num_layers']} layers of {sizes['num_experts']} experts, {sizes['num_chosen']} for a row, "
        f"of {sizes['hidden_size']} x {sizes['intermediate_size']}, with `{experts['operators']}`; "
        "beside them one after the other, one dense product of one row (`dense`), one in the experts' format "
        "(`own`), and on a CPU the same products with the weights of one expert (`in_cache`)."
    )
    ones = {time["format"]: time for time in reversed(experts["times"])}
    added = {
        "hit over one row's": lambda time: number(time["num_hit"] / ones[time["format"]]["num_hit"]),
        "ms over one row's": lambda time: number(time["ms"] / ones[time["format"]]["ms"]),
    }
    yield _table(experts["times"], added)


def _recurrent(recurrent: Row) -> Iterator[str]:
    sizes = recurrent["sizes"]
    yield "## Recurrent layers"
    yield (
        f"{sizes['num_layers']} layers of {sizes['num_heads']} heads of {sizes['head_dim']}, with "
        f"`{recurrent['mixer']}`; beside them torch's operators, and a copy of the states."
    )
    yield _table(recurrent["times"])


def _left_out(states: Mapping[str, str], usual: str) -> Iterator[str]:
    for name, state in states.items():
        if state != usual:
            yield f"`{name}` was not measured: {state.splitlines()[0]}"


def _proposals(proposals: Row) -> Iterator[str]:
    yield "## Proposals"
    yield (
        f"Draft `{proposals['model']}`: step by step, and as one piece of captured work. The bound is its "
        "linear layers alone."
    )
    if captures := proposals.get("captures"):
        yield (
            f"{captures['num_captured']} of {captures['num_shapes']} shapes captured in "
            f"{captures['seconds']:.1f} s; an engine takes at most {captures['limit_s']:g} s at its start."
        )
    share = {"bound share": lambda time: number(time["bound_ms"] / time["loop_ms"])}
    yield _table(proposals["times"], share)


def _summary(results: Row, dtype: str | None) -> Iterator[str]:
    """Greedy decoding of one request, against the bound, plain decoding and transformers."""
    pair, peer = results.get(f"pair {dtype}"), results.get(f"transformers {dtype}")
    if pair is None:
        return
    greedy = {arm["arm"]: arm["tokens_per_s"] for arm in pair["arms"] if arm["temperature"] == 0}
    plain = greedy["off"]
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
    for arm in [] if peer is None else peer["arms"]:
        yield (
            f"- transformers, {arm['arm']}: {arm['tokens_per_s']:.1f} tokens/s; specray's best is "
            f"{max(greedy.values()) / arm['tokens_per_s']:.2f} times that"
        )


def _forwards(forwards: Row) -> Iterator[str]:
    yield (
        f"Weights: {forwards['weight_bytes'] / 1e9:.2f} GB, read by the linear layers alone at "
        f"{forwards['weights_gb_per_s']:.0f} GB/s; a copy moves {forwards['copy_gb_per_s']:.0f} GB/s. "
        f"Blocks of {forwards['block_size']} tokens; attention by default: {forwards['default_attention']}."
    )
    yield from _left_out(forwards["attentions"], "measured")
    yield _table(forwards["times"])
    first = forwards["verifies"][0]
    yield (
        f"What verdicts over a vocabulary of {first['vocab_size']} add to a forward with "
        f"{first['num_drafts']} draft tokens a sequence:"
    )
    yield _table(forwards["verifies"])


def _pair(dtype: str, pair: Row | None, peer: Row | None) -> Iterator[str]:
    if pair is not None:
        yield f"### Draft and target over gRPC, {dtype}"
        agreements = {(entry["arm"], entry["temperature"]): entry for entry in pair["agreements"]}
        plain = {arm["temperature"]: arm["tokens_per_s"] for arm in pair["arms"] if arm["arm"] == "off"}

        def agreement(arm: Row, text: str) -> str:
            entry = agreements.get((arm["arm"], arm["temperature"]))
            return DASH if entry is None else text.format(**entry)

        shown = ("arm", "temperature", "tokens_per_s", "acceptance_rate", "hit_rate", "verify_ms", "draft_ms")
        figures = [{key: arm[key] for key in shown} for arm in pair["arms"]]
        added: dict[str, Callable[[Row], object]] = {
            "of plain": lambda arm: number(arm["tokens_per_s"] / plain[arm["temperature"]]),
            "equal outputs": partial(agreement, text="{num_equal} of {num_outputs}"),
            "divergences per token": partial(agreement, text="{divergence_rate:.5f}"),
        }
        yield _table(figures, added)
        for arm in pair["arms"]:
            if "auto" in arm["arm"]:
                chosen = ", ".join(f"{plan} {share:.0%}" for plan, share in arm["plans"].items())
                yield f"Plans of {arm['arm']} at temperature {arm['temperature']:g}: {chosen}."
    if peer is not None:
        yield f"### transformers, {dtype}"
        yield _table(peer["arms"])
        if pair is not None:
            equal, total = _num_equal(pair, peer), len(pair["greedy"])
            yield f"Outputs of plain decoding equal to transformers', greedy: {equal} of {total}."


def _table(rows: Sequence[Row], added: Mapping[str, Callable[[Row], object]] = MappingProxyType({})) -> str:
    """A table with a column for each figure of a row, and those added, which are made of a row."""
    if not rows:
        return "Nothing was measured."
    figures = {_heading(key): partial(_figure, key=key) for key in rows[0]}
    return markdown_table(table_of("", {**figures, **added}, rows))


def _heading(key: str) -> str:
    return key.removeprefix("num_").removeprefix("is_").replace("_per_", "/").replace("_", " ")


def _figure(row: Row, key: str) -> object:
    value = row[key]
    return (
        number(value, _DIGITS.get(key.rpartition("_")[2], 2))
        if value is None or isinstance(value, float)
        else value
    )
