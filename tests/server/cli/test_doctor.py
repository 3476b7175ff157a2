"""`penstock doctor`: each problem is found and comes with advice."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.checkpoint.folder import model_folder
from engine.config import EngineConfig
from engine.device.facts import select_dtype
from engine.device.limits import cpu_count, free_memory, machine_memory
from engine.memory.model_plan import ModelPlan
from engine.memory.report import plan_memory
from server.cli.doctor import Finding, examine
from tests.support.command_line import penstock

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def engine_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check models here, where torch is imported already, and not in a process each."""

    def check(config: EngineConfig, folder: Path, *more: str) -> None:
        plan_memory(ModelPlan(replace(config, model=str(folder))))

    monkeypatch.setattr("server.cli.model_source._ask_engine", check)


def by_name(**environ: str) -> Mapping[str, Finding]:
    environ = {"PENSTOCK_PORT": "0", **environ}
    findings = examine(None, environ)
    for finding in findings:
        assert finding.level == "ok" or finding.fix, finding
    return {finding.name: finding for finding in findings}


def test_examine_describes_the_machine() -> None:
    found = by_name()
    assert found["python"].text.startswith(".".join(map(str, sys.version_info[:3])))
    for name in ("torch", "cpu", "gpu", "port"):
        assert name in found


def test_examine_reports_the_dtype_that_the_engine_selects() -> None:
    dtype = str(select_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    assert by_name()["cpu"].text.endswith(f"--dtype auto selects {dtype}")


OF_CONTAINERS = {
    "cpu.max": "100000 100000",
    "memory.max": f"{512 << 20}",
    "memory.current": f"{128 << 20}",
    "memory.stat": "active_file 0\ninactive_file 0\n",
}
OF_VERSION_1 = {
    "cpu/cpu.cfs_quota_us": "100000",
    "cpu/cpu.cfs_period_us": "100000",
    "memory/memory.limit_in_bytes": OF_CONTAINERS["memory.max"],
    "memory/memory.usage_in_bytes": OF_CONTAINERS["memory.current"],
    "memory/memory.stat": f"{OF_CONTAINERS['memory.stat']}total_active_file {100 << 20}\n"
    "total_inactive_file 0\n",
}


def control_group(folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text + "\n")
    monkeypatch.setattr("engine.device.limits.CGROUP", folder)


@pytest.mark.parametrize(("files", "free"), [(OF_CONTAINERS, 0.4), (OF_VERSION_1, 0.5)])
def test_examine_in_a_container_reports_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: float
) -> None:
    """The engine uses the same limits."""
    control_group(tmp_path, files, monkeypatch)
    found = by_name()
    assert "cores for this process: 1;" in found["cpu"].text
    assert found["memory"].text == f"{free} of 0.5 GiB available"
    assert "the container's limit" in found["memory"].fix


@pytest.mark.parametrize(
    "files",
    [
        {"cpu.max": "max 100000", "memory.max": "max"},
        OF_VERSION_1
        | {"cpu/cpu.cfs_quota_us": "-1", "memory/memory.limit_in_bytes": "9223372036854771712"},
    ],
)
def test_machine_facts_in_a_container_without_limits_are_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    monkeypatch.setattr("engine.device.limits.CGROUP", tmp_path / "none")
    whole = cpu_count(), machine_memory()
    control_group(tmp_path, files, monkeypatch)
    assert (cpu_count(), machine_memory()) == whole
    assert free_memory() > 1 << 20


def test_examine_checks_the_settings() -> None:
    assert by_name()["settings"].level == "ok"
    assert "at least 1" in by_name(PENSTOCK_THREADS="0")["settings"].text
    assert "/no/model" in by_name(PENSTOCK_MODEL="/no/model")["settings"].text
    absent = by_name(PENSTOCK_MODEL="org/name")["settings"]
    assert (absent.level, absent.text) == (
        "ok", "valid; org/name is not in the cache, `penstock serve` will download it"
    )  # fmt: skip
    unknown = by_name(PENSTOCK_TREADS="1")["settings"]
    assert (unknown.level, "PENSTOCK_THREADS?" in unknown.text) == ("fail", True)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("API_KEY_FILE", "/nonexistent", "Cannot read the API keys in /nonexistent"),
        ("CHAT_TEMPLATE", "/nonexistent", "Cannot read the chat template /nonexistent"),
        ("MAX_MODEL_LEN", "50000", "50000 is more than the 16384 positions"),
        ("KV_CACHE_MEMORY_BYTES", "100TB", "KV blocks"),
    ],
)
def test_examine_with_setting_that_serve_rejects_fails(
    variable: str, value: str, said: str
) -> None:
    finding = by_name(**{f"PENSTOCK_{variable}": value})["settings"]
    assert finding.level == "fail"
    assert said in finding.text


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", None, "no model.safetensors"),
        ("model.safetensors", b"\x08", "is not a readable safetensors file"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", b"{bad", "Cannot read"),
        (
            "config.json",
            b'{"architectures": ["FalconForCausalLM"]}',
            "FalconForCausalLM is not served",
        ),
    ],
)
def test_examine_with_folder_that_serve_rejects_fails(
    tmp_path: Path, file: str, content: bytes | None, said: str
) -> None:
    folder = shutil.copytree(model_folder("demo"), tmp_path / "model")
    assert by_name(PENSTOCK_MODEL=str(folder))["settings"].level == "ok"
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    finding = by_name(PENSTOCK_MODEL=str(folder))["settings"]
    assert (finding.level, said in finding.text) == ("fail", True), finding.text


def test_examine_offline_without_cached_model_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.cli.pull.is_offline_mode", lambda: True)
    finding = by_name(PENSTOCK_MODEL="org/name")["settings"]
    assert (finding.level, "HF_HUB_OFFLINE forbids" in finding.text) == ("fail", True)


def test_examine_with_cached_model_reports_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.cli.pull.cached", lambda name: model_folder("demo"))
    found = by_name(PENSTOCK_MODEL="org/name")["settings"]
    assert found.text == f"valid, with the model in {model_folder('demo')}"


def test_examine_with_port_in_use_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = by_name(PENSTOCK_PORT=str(port))["port"]
    assert finding.level == "fail"
    assert f"by process {os.getpid()}" in finding.text


def test_doctor_command_prints_findings_without_importing_torch() -> None:
    code = (
        "import sys; from server.cli.main import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules"
    )

    def doctor(**environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "doctor"]
        environ = {"PATH": "/usr/bin:/bin", "PENSTOCK_PORT": "0", **environ}
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)

    healthy = doctor()
    assert healthy.returncode == 0, healthy.stdout
    assert "ok    settings" in healthy.stdout
    broken = doctor(PENSTOCK_THREADS="0")
    assert broken.returncode == 1
    assert "fix: correct the named setting" in broken.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-model-len", "16777216"], "--max-model-len 16777216 is more than the"),
        (["--kv-cache-memory-bytes", "900GiB"], "Lower it, or leave the flag out"),
        (["--dtype", "int3"], "--dtype: 'int3' is not one of auto"),
        (["--api-key-file", "/no/such/keys"], "Cannot read the API keys in /no/such/keys"),
    ],
)
def test_doctor_with_a_flag_of_serve_fails_as_serve_would(flags: list[str], words: str) -> None:
    answer = penstock("doctor", "demo", "--port", "0", *flags)
    assert answer.returncode == 1
    assert words in answer.stdout


def test_doctor_with_flags_that_fit_finds_no_fault_and_shows_their_port() -> None:
    answer = penstock("doctor", "demo", "--port", "0", "--dtype", "float32", PENSTOCK_PORT="1")
    assert answer.returncode == 0, answer.stdout
    assert "port 0 is free" in answer.stdout


def test_doctor_with_a_model_that_is_missing_fails() -> None:
    assert "No model folder at /no/such/model" in penstock("doctor", "/no/such/model").stdout
