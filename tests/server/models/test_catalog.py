"""The names of models, and where they come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import ConfigError
from server.cli.serve_models import Source, read_options
from server.config import ServerConfig
from server.models.catalog import Catalog, Options, models_in, read_models_file
from tests.support.fake_models import spec_of


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_models_of_a_folder_have_the_names_of_folders_and_files(tmp_path: Path) -> None:
    checkpoint(tmp_path / "plain")
    checkpoint(tmp_path / "org" / "name")
    for file in ("Q4.gguf", "mmproj-Q4.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
        (tmp_path / file).touch()
    (tmp_path / "notes").mkdir()
    found = dict(models_in(tmp_path))
    assert sorted(found) == ["Q4", "big", "org/name", "plain"]
    assert found["org/name"] == tmp_path / "org" / "name"


def test_model_that_is_added_to_the_folder_is_found(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a")
    source = Source({"config": None, "plan": False}, [], Options(models_dir=str(tmp_path)))
    catalog = source.catalog()
    assert list(catalog.specs) == ["a"]
    checkpoint(tmp_path / "b")
    found = catalog.find("b")
    assert found is not None
    assert found.engine.model == str(tmp_path / "b")


def test_two_models_of_one_name_are_refused() -> None:
    catalog = Catalog()
    catalog.add(spec_of("a", ServerConfig(), aliases=("x",)))
    with pytest.raises(ConfigError, match="Two models have the name x: a and x"):
        catalog.add(spec_of("x", ServerConfig()))


def test_settings_of_a_table_come_before_those_of_the_command_line(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "a")
    file = tmp_path / "models.toml"
    file.write_text(
        f"[models.small]\nmodel = {json.dumps(str(model))}\naliases = ['nick']\n"
        "max-model-len = 128\nkeep-alive = 5\npreload = true\nkv-cache-memory-bytes = '1MiB'\n"
        f"[models.other]\nmodel = {json.dumps(str(model))}\n"
    )
    values = {"config": None, "plan": False, "max_model_len": "256", "batch_dir": str(tmp_path)}
    values |= {"api_key": ["secret"], "allowed_origins": ["*"], "root_path": "/x"}
    source = Source(values, [], Options(models_file=str(file), keep_alive=60))
    specs = source.catalog().specs
    small, other = specs["small"], specs["other"]
    assert (small.engine.max_model_len, other.engine.max_model_len) == (128, 256)
    assert small.engine.kv_cache_memory_bytes == 1 << 20
    assert (small.keep_alive, other.keep_alive) == (5, 60)
    assert (small.preload, other.preload) == (True, False)
    assert small.names == ("small", "nick")
    assert small.server.served_model_name == ("small", "nick")
    assert small.server.batch_dir == str(tmp_path / "small")
    assert small.server.api_key == ("secret",)
    assert (small.server.allowed_origins, small.server.root_path) == ((), "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "one table for each model"),
        ("[models.a]\naliases = []", "models.a: give its checkpoint"),
        ("[models.a]\nmodel = 'demo'\nmax-model = 1", "models.a: max_model is not a setting"),
        ("[models.a]\nmodel = 'demo'\nmax-model-len = 'x'", "models.a: --max-model-len: 'x'"),
        ("[models.a]\nmodel = 'demo'\naliases = 'x'", "aliases must be a list"),
        ("[models.a]\nmodel = 'demo'\nkeep-alive = '10m'", "keep_alive: '10m' is not a number"),
        ("[models.a]\nmodel = '/no/folder'", "No model folder"),
        ("[models", "Cannot read"),
    ],
)
def test_damaged_file_is_refused_with_its_table(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Source({"config": None, "plan": False}, [], Options(models_file=str(file))).catalog()


def test_setting_of_one_model_is_refused_for_all() -> None:
    values = {"config": None, "plan": False, "served_model_name": ["x"]}
    with pytest.raises(ConfigError, match="--served-model-name is for one model"):
        Source(values, ["demo", "demo-translate"], Options())


def test_folder_of_kv_is_not_shared_but_a_table_may_have_one(tmp_path: Path) -> None:
    values = {"config": None, "plan": False, "kv_cache_dir": "x"}
    with pytest.raises(ConfigError, match="--kv-cache-dir is for one model"):
        Source(values, ["demo", "demo-translate"], Options())
    file = tmp_path / "models.toml"
    file.write_text('[models.a]\nmodel = "demo"\nkv-cache-dir = "x"\n')
    source = Source({"config": None, "plan": False}, [], Options(models_file=str(file)))
    assert source.catalog().specs["a"].engine.kv_cache_dir == "x"


def test_options_are_converted_and_checked() -> None:
    given = {"models_dir": None, "models_file": "x", "keep_alive": "1.5", "load_timeout": None}
    options = read_options({**given, "memory": "3GB"})
    assert (options.memory, options.keep_alive, options.load_timeout) == (3_000_000_000, 1.5, 120)
    with pytest.raises(ConfigError, match="--memory: 'much' is not a whole number at least 1"):
        read_options({**given, "memory": "much"})


def test_keys_of_a_table_may_have_dashes(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text("[models.a]\nmodel = 'demo'\nkeep-alive = 1\n")
    assert read_models_file(file) == {"a": {"model": "demo", "keep_alive": 1}}
