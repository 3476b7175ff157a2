"""The command `penstock merge`: flags, a recipe file, and interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.offline.merge.recipe import (
    Decay,
    Ema,
    Factor,
    Linear,
    Liti,
    Normalize,
    Recipe,
    Slerp,
    Source,
    Weight,
    WeightedSource,
    parse,
)
from server import exit_codes
from server.cli.merge import recipe_of
from tests.support.command_line import penstock
from tests.support.process import INTERRUPTIBLE, ROOT, eventually

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
FILE = "model.safetensors"


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Folders of two models with one tensor each: ones in the first, threes in the second."""
    for name, value in (("a", 1.0), ("b", 3.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"architectures": ["Toy"]}')
        save_file({"x": torch.full((4,), value)}, tmp_path / name / FILE)
    return [str(tmp_path / "a"), str(tmp_path / "b")]


PLAIN = (Source(model="a"), Source(model="b"))


def weighted(model: str, weight: float) -> WeightedSource:
    return WeightedSource(model=model, parameters=Weight(weight=weight))


def merge(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "merge", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120)


def recipe(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(text.format(tmp_path))
    return file


YAML = """
merge_method: linear
models:
  - model: {0}/a
    parameters: {{weight: 1}}
  - model: {0}/b
    parameters: {{weight: 3}}
dtype: bfloat16
"""


@pytest.mark.parametrize("way", ["recipe", pytest.param("flags", marks=pytest.mark.slow)])
def test_merge_writes_a_model_folder(way: str, folders: list[str], tmp_path: Path) -> None:
    flags = [*folders, "--method", "liti", "--t", "1e-1", "--base-model", folders[1]]
    arguments = flags if way == "flags" else ["--recipe", recipe(tmp_path, YAML)]
    answer = merge(*arguments, "-o", tmp_path / "out")
    assert answer.returncode == 0, answer.stderr
    assert f"wrote {tmp_path / 'out'}" in answer.stderr
    assert answer.stdout == ""
    [tensor] = load_file(tmp_path / "out" / FILE).values()
    assert tensor.tolist() == pytest.approx([2.8 if way == "flags" else 2.5] * 4)
    assert (tensor.dtype == torch.bfloat16) == (way == "recipe")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--method=slerp", "--t=.5", "--weight=1", "--weight=1"], "--weight cannot be used with"),
        (["--t=1"], "Give --recipe FILE, or --method and the models"),
    ],
)
def test_merge_with_invalid_flags_exits_with_2(
    flags: list[str], said: str, folders: list[str], tmp_path: Path
) -> None:
    answer = penstock("merge", *folders, *flags, "-o", str(tmp_path / "out"))
    check_refused(answer, said, tmp_path / "out")


def test_merge_of_a_missing_model_exits_with_2(folders: list[str], tmp_path: Path) -> None:
    answer = merge(*folders, "--method=linear", "missing", "-o", tmp_path / "out")
    check_refused(answer, "No model folder at", tmp_path / "out")


def check_refused(answer: subprocess.CompletedProcess[str], said: str, out: Path) -> None:
    assert answer.returncode == exit_codes.BAD_CONFIG
    assert said in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
    assert not out.exists()


@pytest.mark.slow
def test_merge_into_a_link_to_an_empty_folder_keeps_the_link(
    folders: list[str], tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    answer = merge(*folders, "--method", "linear", "-o", tmp_path / "out")
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / FILE).is_file()


def document(
    file: Path | None = None,
    models: Sequence[str] = ("a", "b"),
    method: str | None = "linear",
    base_model: str | None = None,
    weights: Sequence[float] = (),
    dtype: str | None = None,
    **parameters: float | bool | None,
) -> dict[str, Any]:
    return recipe_of(file, models, method, base_model, weights, dtype, **parameters)


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        ({}, Linear(models=(weighted("a", 1), weighted("b", 1)))),
        (
            {"weights": [2, 3], "normalize": False},
            Linear(
                models=(weighted("a", 2), weighted("b", 3)), parameters=Normalize(normalize=False)
            ),
        ),
        ({"method": "ema", "decay": 0.9}, Ema(models=PLAIN, parameters=Decay(decay=0.9))),
        (
            {"method": "slerp", "t": 0.5, "decay": None},
            Slerp(base_model="a", models=PLAIN, parameters=Factor(t=0.5)),
        ),
        (
            {"method": "liti", "t": 1.0, "base_model": "b", "dtype": "float16"},
            Liti(base_model="b", models=PLAIN, parameters=Factor(t=1), dtype="float16"),
        ),
    ],
)
def test_recipe_of_flags_equals_the_recipe(flags: dict[str, Any], same: Recipe) -> None:
    assert parse(document(**flags)) == same


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"weights": [1]}, "--weight: 1 given for 2 models"),
        ({"method": None}, "Give --recipe FILE, or --method"),
        ({"models": []}, "Give --recipe FILE, or --method"),
        ({"method": "mean"}, "--method: 'mean' is not one of linear, ema, slerp, liti"),
        ({"method": "slerp"}, "--method slerp needs --t, a number from 0 to 1"),
        ({"method": "ema"}, "--method ema needs --decay, a number from 0 to 1"),
        ({"method": "ema", "decay": 1, "t": 0}, "--t cannot be used with --method ema"),
        ({"method": "linear", "decay": 1}, "--decay cannot be used with --method linear"),
        ({"method": "liti", "t": 4.0}, "--t: 4.0 is not a number from 0 to 1"),
        ({"method": "ema", "decay": float("nan")}, "--decay: nan is not a number from 0 to 1"),
        ({"dtype": "fp16"}, "--dtype: 'fp16' is not one of float32, bfloat16, float16"),
        ({"models": ["a"]}, "--method linear needs at least two models; given: a."),
        (
            {"models": ["a"], "method": "slerp", "t": 1},
            "merges two models, including the base model; given: a.",
        ),
        ({"method": "liti", "t": 1, "base_model": "c"}, "the base model; given: c, a, b."),
        ({"file": Path("r.yaml")}, "--recipe r.yaml allows no other flag than --output"),
        ({"file": Path("r.yaml"), "models": [], "method": None, "t": 0}, "allows no other flag"),
        ({"file": Path("r.yaml"), "models": [], "method": None}, "Cannot read the YAML file r"),
    ],
)
def test_recipe_of_invalid_flags_raises(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(document(**flags))
    assert said in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_merge_stopped_by_a_signal_leaves_no_files(
    number: signal.Signals, status: int, folders: list[str], tmp_path: Path
) -> None:
    size = 2 << 30
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"x": entry}).encode()
    for folder in folders:
        with (Path(folder) / FILE).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)  # sparse: slow to read, but takes no disk space
    before = sorted(tmp_path.iterdir())
    command = [*INTERRUPTIBLE, sys.executable, "-m", "server", "merge", *folders]
    process = subprocess.Popen(
        [*command, "--method", "linear", "-o", str(tmp_path / "out")], cwd=ROOT, env=ENV, text=True,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        eventually(lambda: list(tmp_path.glob(f".out-*/{FILE}")), "the merge is writing", 60)
        os.killpg(process.pid, number)  # a terminal signals the whole process group
        _, log = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == status
    assert sorted(tmp_path.iterdir()) == before
    assert "Traceback" not in log
