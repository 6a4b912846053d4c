"""Prometheus text: of one registry, and of many processes merged, each sample with labels of its process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest


def registry_text(registry: CollectorRegistry) -> str:
    """Returns all metrics in Prometheus text format.

    ``prometheus_client`` adds a gauge with its creation time to each of its own counters and histograms: a
    third of all series, which nobody uses.
    """
    lines = generate_latest(registry).decode().splitlines()
    return "".join(f"{line}\n" for line in lines if not _family(line).endswith("_created"))


def _family(line: str) -> str:
    if line.startswith("# "):
        return line.split(" ", 3)[2]
    return line.partition("{")[0].partition(" ")[0]


def labelled(text: str, labels: Mapping[str, str]) -> str:
    """Adds ``labels`` before each sample's own labels, which must have other names."""
    added = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "".join(f"{_with_labels(line, added)}\n" for line in text.splitlines()) if added else text


def merged(texts: Iterable[str]) -> str:
    """Merges texts so that every metric family occurs once, followed by all its samples.

    Families keep the order in which they are first seen. Equal samples of two texts must differ in their
    labels.
    """
    families: dict[str, tuple[dict[str, str], list[str]]] = {}
    for text in texts:
        header, samples = families.setdefault("", ({}, []))
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, keyword, name, *_ = line.split(" ", 3)
                header, samples = families.setdefault(name, ({}, []))
                # Two versions of specray may word the help differently; a scraper accepts only one.
                header.setdefault(keyword, line)
            elif line and not line.startswith("#"):
                samples.append(line)
    lines = (line for header, samples in families.values() for line in (*header.values(), *samples))
    return "".join(f"{line}\n" for line in lines)


def _with_labels(line: str, added: str) -> str:
    if not line or line.startswith("#"):
        return line
    # A name ends at the first brace or space.
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        separator = "" if rest.startswith("}") else ","
        return f"{name}{{{added}{separator}{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{added}}} {value}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
