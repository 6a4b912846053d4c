"""A candidate: something that could draft for the target, and the configuration that would serve it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from specray.bench.methods.method import IN_TARGET, Method
from specray.config import Config, parse_config
from specray.errors import ConfigError
from specray.types import DraftKind


@dataclass(frozen=True, slots=True)
class Candidate:
    """One row of the advice: a draft, with chains or with trees of a set shape."""

    name: str
    config: Config
    """Configuration of the pair that has the draft."""
    tree: str = "off"
    source: str = ""
    """Name of the candidate on which steps are timed; empty: this one."""

    @property
    def kind(self) -> DraftKind:
        return self.config.draft.kind_in_use

    @property
    def timed_as(self) -> str:
        """Name under which its steps are timed.

        Trees of a draft need the same steps as its chains; those of a drafter on the target have their own.
        """
        return self.source or self.name

    def method(self, process: str = "") -> Method:
        """The candidate as a method of ``specray bench methods``.

        Args:
            process: name of the draft's worker; empty: it has none.
        """
        return Method(self.name, self.kind, self.tree, process)

    def fitting(self, ks: Sequence[int]) -> list[int]:
        """The K that its proposals can have: paths of a tree end where its shape does."""
        budget = self.method().budget
        if budget is None or not budget.widths:
            return list(ks)
        return [k for k in ks if k < len(budget.widths)] + [len(budget.widths)]

    def serving_values(self) -> dict[str, Any]:
        """The keys of a configuration file that serves the candidate, where they differ from the defaults.

        K stays ``auto``: the service chooses it for each load, by the formulas that predicted the advice.
        """
        values: dict[str, Any] = self.config.model_dump(mode="json", exclude_defaults=True)
        values.setdefault("target", {}).setdefault("model", self.config.target.model)
        values.setdefault("draft", {}).setdefault("model", self.config.draft.model)
        values.setdefault("speculation", {}).update({"num_speculative_tokens": "auto", "tree": self.tree})
        return values


def candidates_of(configs: Mapping[str, Config], trees: Sequence[str]) -> list[Candidate]:
    """Every draft with chains, and with each of the trees where it can propose them.

    Args:
        configs: of the pairs, by the name of the draft.
        trees: as in ``speculation.tree``, set ones only.

    Raises:
        ConfigError: a tree is none, or is chosen by measurement.
    """
    found: list[Candidate] = []
    for name, config in configs.items():
        chains = Candidate(name, config)
        found.append(chains)
        if chains.kind is DraftKind.LOOKAHEAD:
            continue
        timed_as = "" if chains.kind in IN_TARGET else name
        for tree in trees:
            one = Candidate(f"{name}:{tree}", config, tree, timed_as)
            if tree in ("auto", "off") or one.method().budget is None:
                raise ConfigError(
                    f"--tree is {tree!r}; allowed: a number of nodes, or children such as 4x2x1"
                )
            found.append(one)
    return found


def processes_of(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Names of the workers of draft models, by the draft with chains: its trees share its worker."""
    models = dict.fromkeys(one.timed_as for one in candidates if one.kind is DraftKind.MODEL)
    return {name: f"draft-{number}" for number, name in enumerate(models)}


def on_targets(candidates: Sequence[Candidate]) -> list[tuple[Config, list[Candidate]]]:
    """The drafters on the target, each with chains and trees: what shares a process of the target."""
    drafters = (one for one in candidates if one.kind is DraftKind.FEATURES)
    return [(config, list(group)) for config, group in itertools.groupby(drafters, key=attrgetter("config"))]


def without_draft(config: Config) -> Config:
    """The target alone, without a drafter on it; requests that name a draft have K chosen for each load."""
    values = config.model_dump(mode="json", exclude_defaults=True)
    values.setdefault("target", {})["drafter"] = None
    values["draft"] = {"enabled": False}
    values.setdefault("speculation", {})["num_speculative_tokens"] = "auto"
    return parse_config(values)


def split_keys(draft: str) -> tuple[str, list[str]]:
    model, _, keys = draft.rpartition("@")
    return (model, keys.split(",")) if model and "=" in keys else (draft, [])


def short_names(drafts: Sequence[str]) -> list[str]:
    """A name for each draft: the end of its path, or all of it where two are alike; and the keys it sets."""
    parts = [split_keys(draft) for draft in drafts]
    names = [
        "@".join((Path(model).name or model, *([",".join(keys)] if keys else []))) for model, keys in parts
    ]
    return [draft if names.count(name) > 1 else name for name, draft in zip(names, drafts, strict=True)]
