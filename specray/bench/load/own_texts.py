"""Prompts whose answers repeat them: edits of whole files, which the package has, and JSON."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

EDITS: Final = (
    ("router/deferred.py", "Later", "Postponed"),
    ("router/readiness.py", "Readiness", "TargetHealth"),
    ("router/first_tokens.py", "FirstTokens", "EarlyRejections"),
    ("rpc/workers/busy.py", "BusyMeter", "LoadGauge"),
    ("control/expectations.py", "ExpectedRound", "RoundForecast"),
)
"""A file of the package, a class that it defines, and another name for it."""
JSON_TASKS: Final = (
    "eight large cities, each with name, country, population and a list of two sights",
    "six planets, each with name, diameter_km, num_moons and has_rings",
    "five orders of a shop, each with id, customer (name, email), items (sku, count, price) and total",
    "seven employees, each with id, name, role, start_date and manager_id",
    "six sensors, each with id, location (latitude, longitude), unit and the last three readings",
)


def edit_prompts() -> list[str]:
    """A rename in a whole file each."""
    root = files("specray")
    return [
        f"Rename the class {name} to {new} everywhere in this file, and change nothing else. Answer with the "
        f"whole file alone.\n\n```python\n{root.joinpath(path).read_text('utf-8')}```"
        for path, name, new in EDITS
    ]


def json_prompts() -> list[str]:
    """A list of objects of the same fields each."""
    return [f"Write a JSON array of {task}. Answer with the JSON alone." for task in JSON_TASKS]
