"""One version: the package's, in everything that names one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from specray import __version__

ROOT = Path(__file__).resolve().parents[2]


def test_package_takes_it_from_its_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "specray.__version__"}


def test_chart_and_changelog_have_the_same() -> None:
    chart = yaml.safe_load((ROOT / "helm/specray/Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], str(chart["appVersion"])) == (__version__, __version__)
    heading = re.search(r"^## (\S+)", (ROOT / "docs/changelog.md").read_text(encoding="utf-8"), re.M)
    assert heading and heading[1] == __version__


@pytest.mark.parametrize("path", ["cluster/Dockerfile", "cluster/ray-up.yaml", "docs/kubernetes.md"])
def test_images_are_tagged_with_it(path: str) -> None:
    tags = re.findall(r"/specray:(\d[\w.]*)", (ROOT / path).read_text(encoding="utf-8"))
    assert set(tags) == {__version__}
