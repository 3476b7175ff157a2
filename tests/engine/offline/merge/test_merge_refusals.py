"""Merging rejects invalid inputs with a message that names them, and leaves no files."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.offline.merge.recipe import parse
from tests.engine.offline.merge.merging import FILE, Make, linear, random, refusal, run, slerp

pytestmark = pytest.mark.usefixtures("one_thread")


def test_merge_shape_mismatch_names_tensor_shapes_and_files(make: Make, tmp_path: Path) -> None:
    folders = [make("a", {"x.weight": torch.ones(2, 3)}), make("b", {"x.weight": torch.ones(2, 4)})]
    said = refusal(tmp_path / "out", linear(folders))
    assert said == (
        f"x.weight has shape [2, 3] in {folders[0]}/{FILE} but [2, 4] in {folders[1]}/{FILE}."
    )


def test_merge_missing_tensor_is_named(make: Make, tmp_path: Path) -> None:
    """Even if it has the shape of another tensor, as an untied LM head does."""
    tensors = random(0, embed=(4, 2))
    head = random(1, head=(4, 2))
    folders = [make("a", tensors), make("b", tensors | head)]
    for order in (folders, folders[::-1]):
        said = refusal(tmp_path / "out", linear(order))
        assert f"head is in {folders[1]}/{FILE} but not in {folders[0]}" in said


def test_merge_untied_head_missing_in_other_model_is_refused(make: Make, tmp_path: Path) -> None:
    """The head may equal the token embedding, but its config loads it, and the other has none."""
    tensors = {"model.embed_tokens.weight": torch.ones(4, 2)}
    head = {"lm_head.weight": torch.ones(4, 2)}
    untied = make("a", tensors | head, tie_word_embeddings=False)
    tied = make("b", tensors, tie_word_embeddings=True)
    said = refusal(tmp_path / "out", linear([untied, tied]))
    assert f"lm_head.weight is in {untied}/{FILE} but not in {tied}" in said
    assert "lm_head.weight" not in run(tmp_path / "out", **linear([tied, untied]))


def test_merge_different_architectures_are_refused(make: Make, tmp_path: Path) -> None:
    folders = [make("a", random(0)), make("b", random(1), architectures=["Other"])]
    said = refusal(tmp_path / "out", linear(folders))
    assert "['Toy']" in said
    assert "['Other']" in said


def test_merge_into_mount_point_is_refused_before_merging(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [make("a", random(0)), make("b", random(1))]
    (out := tmp_path / "out").mkdir()

    def busy(folder: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(folder))

    monkeypatch.setattr(Path, "rmdir", busy)  # Linux gives this error for every kind of mount
    monkeypatch.setattr("engine.offline.merge.merge._write_weights", pytest.fail)
    said = refusal(out, linear(folders))
    assert f"{out} cannot be replaced by the new folder: Device or resource busy" in said
    assert f"give {out}/model" in said


def test_merge_damaged_input_file_is_refused(make: Make, tmp_path: Path) -> None:
    folders = [make("a", random(0)), make("b", random(1))]
    file = Path(folders[1], FILE)
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file} is not a readable safetensors file" in refusal(
        tmp_path / "out", linear(folders)
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_merge_non_finite_result_is_refused(make: Make, tmp_path: Path, value: float) -> None:
    folders = [make("a", {"x": torch.ones(2).half()}), make("b", {"x": torch.tensor([1.0, value])})]
    said = refusal(tmp_path / "out", linear(folders))
    assert f"x of {folders[0]}/{FILE} and {folders[1]}/{FILE} comes out with NaN or inf" in said


def test_merge_into_non_empty_folder_is_refused(make: Make, tmp_path: Path) -> None:
    folders = [make("a", random(0)), make("b", random(1))]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert "exists and is not an empty folder" in refusal(tmp_path / "out", linear(folders))
    (tmp_path / "out" / "mine").unlink()
    assert run(tmp_path / "out", **linear(folders))
    with pytest.raises(ConfigError, match="none is not a folder"):
        run(tmp_path / "none" / "out", **linear(folders))


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            {"merge_method": "ties", "models": []},
            "'ties' - at `$.merge_method` (linear, ema, slerp",
        ),
        ({"merge_method": "slerp", "slices": []}, "unknown field `slices`"),
        (slerp(["a", "b"], 2), "<= 1.0 - at `$.parameters.t`"),
        (slerp(["a", "b"], float("nan")), "`$.parameters.t`"),
        (slerp(["a", "b"], 0.5) | {"tokenizer_source": "union"}, "`tokenizer_source`"),
        (slerp(["a", "b"], 0.5) | {"base_model": None}, "`$.base_model`"),
        (
            slerp(["a", "b"], 0.5) | {"parameters": {"t": [0, 1]}},
            "got `array` - at `$.parameters.t`",
        ),
        (slerp(["a", "b"], 0.5) | {"parameters": {}}, "missing required field `t`"),
        (slerp(["a", "b", "c"], 0.5), "must name two models, not ['a', 'b', 'c']"),
        (slerp(["a"], 0.5), "must name two models, not ['a']"),
        (linear(["a", "b"]) | {"dtype": "int8"}, "'int8' - at `$.dtype`"),
        (linear(["a", "b"], 1, -1), "[1.0, -1.0] must be finite and"),
        (linear(["a", "b"], 1, float("inf")), "must be finite"),
        (linear(["a", "b"], t=0.5), "unknown field `t` - at `$.parameters`"),
        (linear(["a"]), "length >= 2 - at `$.models`"),
        (linear(["a", "b"]) | {"merge_method": "ema"}, "`weight` - at `$.models[0].parameters`"),
        ([], "got `array`"),
    ],
)
def test_recipe_invalid_field_is_named(document: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(document)
    assert said in str(caught.value)
