"""A URL of huggingface.co where ORG/NAME is expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.cli.hub_url import from_url
from server.cli.model_source import resolve_model
from server.config import ServerConfig


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("https://huggingface.co/org/name", ("org/name", None, None)),
        ("http://www.huggingface.co/org/name/", ("org/name", None, None)),
        ("hf.co/org/name-1.5_b", ("org/name-1.5_b", None, None)),
        ("https://huggingface.co/org/name/tree/main", ("org/name", "main", None)),
        ("https://huggingface.co/org/name/tree/v2?show=1", ("org/name", "v2", None)),
        ("https://huggingface.co/org/name/blob/main/config.json", ("org/name", "main", None)),
        (" https://huggingface.co/org/name#usage ", ("org/name", None, None)),
        (
            "https://huggingface.co/org/name/blob/main/q4/model.Q4_K.gguf?download=true",
            ("org/name", "main", "q4/model.Q4_K.gguf"),
        ),
        ("org/name", ("org/name", None, None)),
        ("./folder", ("./folder", None, None)),
        ("https://example.org/org/name", ("https://example.org/org/name", None, None)),
    ],
)
def test_from_url_returns_name_revision_and_file(
    given: str, expected: tuple[str, str | None, str | None]
) -> None:
    assert from_url(given) == expected


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://huggingface.co/datasets/name", "not the page of a model"),
        ("https://huggingface.co/spaces/name/tree/main", "not the page of a model"),
    ],
)
def test_from_url_of_no_served_model_raises_config_error(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_url(url)


def test_resolve_model_url_of_other_revision_names_the_pull_command() -> None:
    config = EngineConfig(model="https://huggingface.co/org/name/tree/v2")
    drafting = EngineConfig(speculative_model=config.model)
    for refused in (config, drafting):
        with pytest.raises(ConfigError, match=r"penstock pull org/name --revision v2"):
            resolve_model(ServerConfig(), refused)


def test_resolve_model_finds_the_draft_model_like_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    located: list[tuple[str, bool, str | None]] = []

    def locate(name: str, check: object, tell: object, weights: bool, file: str | None) -> Path:
        located.append((name, weights, file))
        return tmp_path

    monkeypatch.setattr("server.cli.pull.locate", locate)
    url = "https://huggingface.co/org/small/blob/main/q8.gguf"
    for given, weights in (("org/small", True), (url, False)):
        config = EngineConfig(speculative_model=given)
        names, found = resolve_model(ServerConfig(), config, weights=weights)
        assert (found.model, found.speculative_model) == ("demo", str(tmp_path))
        assert names.served_model_name == ()
    assert located == [("org/small", True, None), ("org/small", False, "q8.gguf")]
    local = EngineConfig(speculative_model="./folder")
    assert resolve_model(ServerConfig(), local)[1].speculative_model == "./folder"
