"""`penstock doctor`: each trouble it knows is found and comes with a line that mends it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from server.doctor import Finding, examine

ROOT = Path(__file__).resolve().parents[2]


def by_name(model: Path | None = None, **environ: str) -> Mapping[str, Finding]:
    environ = {"PENSTOCK_PORT": "0", **environ}
    findings = examine(str(model) if model else None, None, environ)
    for finding in findings:
        assert finding.level == "ok" or finding.fix, finding
    return {finding.name: finding for finding in findings}


def safetensors(path: Path, size: int = 16, cut: int = 0) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "lm_head.weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size - cut))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    safetensors(tmp_path / "model.safetensors")
    return tmp_path


def test_a_sound_checkpoint_passes(checkpoint: Path) -> None:
    found = by_name(checkpoint)
    assert {found[name].level for name in ("model", "tokenizer", "weights", "settings")} == {"ok"}
    assert found["weights"].text == "1 tensors in 1 files, 0.0 MiB"
    assert "LlamaForCausalLM" in found["model"].text


def test_the_machine_is_described(checkpoint: Path) -> None:
    found = by_name(checkpoint)
    assert found["python"].text.startswith(".".join(map(str, sys.version_info[:3])))
    for name in ("torch", "cpu", "gpu", "open files", "port"):
        assert name in found


def test_a_truncated_file_fails(checkpoint: Path) -> None:
    safetensors(checkpoint / "model.safetensors", cut=4)
    finding = by_name(checkpoint)["weights"]
    assert finding.level == "fail"
    assert "model.safetensors is not a readable safetensors file: " in finding.text
    assert "incomplete" in finding.text


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, (5).to_bytes(8, "little") + b"{...}"])
def test_a_file_of_another_kind_fails(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    finding = by_name(checkpoint)["weights"]
    assert finding.level == "fail"
    assert "model.safetensors" in finding.text


def test_a_missing_shard_fails(checkpoint: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    finding = by_name(checkpoint)["weights"]
    assert finding.level == "fail"
    assert "model-2.safetensors" in finding.text


def test_what_a_folder_lacks_is_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "config.json").write_text('{"architectures": ["HyenaForDNA"]}')
    found = by_name(checkpoint)
    assert {found[name].level for name in ("model", "tokenizer", "weights")} == {"fail"}
    assert "HyenaForDNA is not served" in found["model"].text
    (checkpoint / "config.json").unlink()
    assert "has no config.json" in by_name(checkpoint)["model"].text


def test_settings_are_linted(checkpoint: Path) -> None:
    assert "at least 1" in by_name(checkpoint, PENSTOCK_THREADS="0")["settings"].text
    unknown = by_name(checkpoint, PENSTOCK_TREADS="1")["settings"]
    assert (unknown.level, "PENSTOCK_THREADS?" in unknown.text) == ("warn", True)


def test_a_taken_port_fails(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = by_name(checkpoint, PENSTOCK_PORT=str(port))["port"]
    assert finding.level == "fail"
    assert f"by process {os.getpid()}" in finding.text


def test_the_command_prints_the_findings_and_fails_without_loading_torch(checkpoint: Path) -> None:
    code = (
        "import sys; from server.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    arguments = ["doctor", str(checkpoint)]
    environ = {"PATH": "/usr/bin:/bin", "PENSTOCK_PORT": "0"}

    def doctor() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)

    healthy = doctor()
    assert healthy.returncode == 0, healthy.stdout
    assert "weights     1 tensors" in healthy.stdout
    (checkpoint / "tokenizer.json").unlink()
    broken = doctor()
    assert broken.returncode == 1
    assert f"fix: put the checkpoint's tokenizer.json into {checkpoint}" in broken.stdout
