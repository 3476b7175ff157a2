"""The files of weights in a folder are those that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from engine.checkpoint.folder import NOTES, notes_of, weight_files, weights_index
from engine.errors import ConfigError
from tests.support.driver import tiny_llama

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED = "model.embed_tokens.weight"
SHARD = "model-00001-of-00001.safetensors"
# The files of a folder, each with the value of all its weights. A text is a file in an index.
FOLDERS: dict[str, dict[str, float | str]] = {
    "one file": {FILE: 1.0},
    "an index": {SHARD: 1.0, INDEX: SHARD},
    "a shard of an earlier save": {"a.safetensors": 1.0, SHARD: 2.0, INDEX: "a.safetensors"},
    "an index of a folder": {"sub/a.safetensors": 1.0, INDEX: "sub/a.safetensors"},
    "a file and an index": {FILE: 1.0, SHARD: 2.0, INDEX: SHARD},
    "a file and an index of nothing": {FILE: 1.0, INDEX: SHARD},
    "Mistral's format": {FILE: 1.0, "consolidated.safetensors": 2.0},
    "an adapter": {FILE: 1.0, "adapter_model.safetensors": 2.0},
    "a variant": {FILE: 1.0, "model.fp16.safetensors": 2.0},
    "a variant with an index": {FILE: 1.0, "model.fp16.safetensors.index.json": SHARD},
    "shards without an index": {FILE: 1.0, SHARD: 2.0},
}
NONE: dict[str, dict[str, float | str]] = {
    "only Mistral's format": {"consolidated.safetensors": 1.0},
    "only a variant": {"model.fp16.safetensors": 1.0},
    "only an adapter": {"adapter_model.safetensors": 1.0},
    "only shards": {SHARD: 1.0},
    "only in a folder": {"sub/model.safetensors": 1.0},
    "nothing": {},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    return tiny_llama(folder, num_hidden_layers=1, vocab_size=40, hidden_size=16)


def write(model: Path, folder: Path, files: dict[str, float | str], **config: Any) -> Path:
    """Write a folder with weights of one value for each file."""
    folder.mkdir()
    weights = load_file(model / FILE)
    settings = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **config}))
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(value, str):
            index = {"metadata": {}, "weight_map": dict.fromkeys(weights, value)}
            (folder / name).write_text(json.dumps(index))
        else:
            filled = {key: torch.full_like(weight, value) for key, weight in weights.items()}
            save_file(filled, folder / name, metadata={"format": "pt"})
    return folder


def value_in(folder: Path) -> float:
    """Return the value of the weights that are read, and check it against transformers."""
    (file,) = weight_files(folder)
    value = load_file(file)[EMBED][0, 0].item()
    reference = LlamaForCausalLM.from_pretrained(folder)
    assert reference.model.embed_tokens.weight[0, 0].item() == value
    return value


@pytest.mark.parametrize("name", FOLDERS)
def test_weight_files_among_others_are_those_of_transformers(
    model: Path, tmp_path: Path, name: str
) -> None:
    assert value_in(write(model, tmp_path / "model", FOLDERS[name])) == 1.0


@pytest.mark.parametrize("name", NONE)
def test_weight_files_that_transformers_refuses_raise_and_name_the_others(
    model: Path, tmp_path: Path, name: str
) -> None:
    folder = write(model, tmp_path / "model", NONE[name])
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        LlamaForCausalLM.from_pretrained(folder)
    with pytest.raises(ConfigError, match=f"has no {FILE}, no {INDEX}") as caught:
        weight_files(folder)
    for file in NONE[name]:
        assert "/" in file or file in str(caught.value)


def test_weight_files_absent_shard_is_named(model: Path, tmp_path: Path) -> None:
    folder = write(model, tmp_path / "model", {INDEX: SHARD, "other.safetensors": 1.0})
    with pytest.raises(ConfigError, match=f"{INDEX} lists files not in .*: {SHARD}"):
        weight_files(folder)


def test_weight_files_many_absent_shards_are_counted(model: Path, tmp_path: Path) -> None:
    folder = write(model, tmp_path / "model", {INDEX: SHARD})
    named = {f"w{n}": f"{n:05}.safetensors" for n in range(20_000)}
    (folder / INDEX).write_text(json.dumps({"weight_map": named}))
    with pytest.raises(ConfigError, match=r"00004\.safetensors and 19995 more\.$") as refused:
        weight_files(folder)
    assert len(str(refused.value)) < 1000


def test_weight_files_name_too_long_for_a_file_is_absent(model: Path, tmp_path: Path) -> None:
    folder = write(model, tmp_path / "model", {INDEX: SHARD})
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "x" * 1_000_000}}))
    with pytest.raises(ConfigError, match=r"lists files not in .*characters left out") as refused:
        weight_files(folder)
    assert len(str(refused.value)) < 1000


def test_notes_of_a_folder_are_bounded(tmp_path: Path) -> None:
    (tmp_path / NOTES).write_text(json.dumps(["a", "x" * 10_000] * 500))
    notes = notes_of(tmp_path)
    assert notes[0] == "a"
    assert notes[-1].startswith("950 more notes are in ")
    assert len("".join(notes)) < 60_000


@pytest.mark.parametrize(
    ("named", "files"),
    [
        ("other.safetensors", {FILE: 2.0, "other.safetensors": 1.0}),
        ("x.safetensors.index.json", {FILE: 2.0, SHARD: 1.0, "x.safetensors.index.json": SHARD}),
        # The index lies in a folder; its files are relative to the checkpoint's.
        ("sub/x.safetensors.index.json", {SHARD: 1.0, "sub/x.safetensors.index.json": SHARD}),
    ],
)
def test_weight_files_with_transformers_weights_are_the_named_ones(
    model: Path, tmp_path: Path, named: str, files: dict[str, float | str]
) -> None:
    folder = write(model, tmp_path / "model", files, transformers_weights=named)
    assert value_in(folder) == 1.0
    assert weights_index(folder) == (named if named.endswith(".json") else None)


@pytest.mark.parametrize("named", ["../x.safetensors", "/x.safetensors", "x.bin", "", 3, "a/../x"])
def test_weight_files_transformers_weights_outside_or_of_other_kind_raise(
    model: Path, tmp_path: Path, named: Any
) -> None:
    folder = write(model, tmp_path / "model", {FILE: 1.0}, transformers_weights=named)
    with pytest.raises(ConfigError, match="transformers_weights = "):
        weight_files(folder)


def test_weight_files_named_file_is_absent_raises(model: Path, tmp_path: Path) -> None:
    folder = write(model, tmp_path / "model", {FILE: 1.0}, transformers_weights="x.safetensors")
    with pytest.raises(ConfigError, match=r"has no x.safetensors, which transformers_weights"):
        weight_files(folder)
