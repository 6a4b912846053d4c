"""Reports as Markdown, from the tables that the terminal shows."""

from __future__ import annotations

from rich.table import Table

from specray.bench.core.report import markdown_table, page


def table() -> Table:
    made = Table(title="two methods")
    made.add_column("method")
    made.add_column("tokens/s", justify="right")
    made.add_row("plain", "10.5")
    made.add_row("a|b", "–")
    return made


def test_rows_of_a_table_keep_their_sides_and_bars_are_escaped() -> None:
    assert markdown_table(table()).splitlines() == [
        "| method | tokens/s |",
        "| --- | ---: |",
        "| plain | 10.5 |",
        "| a\\|b | – |",
    ]


def test_page_says_what_wrote_it_and_where_before_its_tables() -> None:
    parts = page("Methods", "specray bench methods", ["A note."], [table()]).split("\n\n")
    assert parts[:2] == ["# Methods", "> Written by `specray bench methods`."]
    assert " cores, " in parts[2] and "; commit `" in parts[2]
    assert parts[3].startswith("```bash\nspecray")
    assert parts[4:6] == ["A note.", "## two methods"]
    assert parts[6] == markdown_table(table()) + "\n"
