"""Settings of the documentation as a static site: ``make docs`` builds it with Sphinx and MyST."""

from __future__ import annotations

from pathlib import Path

project = "specray"
author = "the specray authors"
copyright = author
# Of the package, which is not imported: only the tools of this site are installed.
_package = Path(__file__).parents[1] / "specray" / "__init__.py"
release = version = _package.read_text(encoding="utf-8").split('__version__ = "')[1].split('"')[0]

extensions = ["myst_parser"]
root_doc = "index"
# Anchors of headings, as links have them where a repository's pages are shown.
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"specray {release}"
# The sources are in the repository.
html_copy_source = False
