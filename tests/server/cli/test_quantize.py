"""`penstock quantize`: MODEL is found as `penstock serve` finds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.tensors import checkpoint_tensors
from server.cli import short_commands
from tests.support.process import ROOT


def test_model_of_the_hub_is_quantized_from_its_pulled_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pulled = tmp_path / "org/name"
    pulled.mkdir(parents=True)
    (pulled / "config.json").write_text("{}")
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr("server.cli.pull.locate", lambda name, *rest: tmp_path / name)
    monkeypatch.setattr(short_commands, "become", lambda *command: started.append(command))
    short_commands.quantize("org/name", tmp_path / "out", "int8")
    assert started == [("engine.offline.quantize.command", str(pulled), tmp_path / "out", "int8")]


@pytest.mark.slow
def test_command_writes_the_folder_and_names_what_stays_plain(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "server", "quantize", "demo", str(tmp_path / "out")]
    for status, said in (
        (0, f"wrote {tmp_path / 'out'}: 28 weights as int4"),
        (2, f"{tmp_path / 'out'} exists and is not an empty folder"),
    ):
        answer = subprocess.run(
            [*command, "--quantization", "int4"],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert (answer.returncode, answer.stdout) == (status, "")
        assert said in answer.stderr
        assert ("stay plain: lm_head" in answer.stderr) == (status == 0)
    kinds = [getattr(each, "kind", None) for each in checkpoint_tensors(tmp_path / "out").values()]
    assert kinds.count("compressed-tensors") == 28
