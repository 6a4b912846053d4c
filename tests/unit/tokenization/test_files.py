"""Files that say whether a model chats, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from specray.tokenization.files import has_chat_template


@pytest.mark.parametrize(
    ("name", "content", "chats"),
    [
        ("chat_template.jinja", "{{ messages }}", True),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}', True),
        ("tokenizer_config.json", '{"chat_template": null}', False),
        ("tokenizer_config.json", "[]", False),
        ("tokenizer_config.json", "{", False),
        ("tokenizer.json", "{}", False),
    ],
)
def test_a_directory_with_a_chat_template(tmp_path: Path, name: str, content: str, chats: bool) -> None:
    (tmp_path / name).write_text(content)
    assert has_chat_template(tmp_path) is chats


@pytest.mark.parametrize("hub_id", ["owner/model", "no hub id: /x/y"])
def test_a_hub_id_that_is_not_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_id: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert not has_chat_template(hub_id)


def test_a_hub_id_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (repository / "snapshots" / ("a" * 40) / "chat_template.jinja").write_text("x")
    assert has_chat_template("owner/model")
