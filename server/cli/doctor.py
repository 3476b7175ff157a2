"""`penstock doctor`: find problems of the machine, settings or model that would prevent serving."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from msgspec.structs import replace

from engine.checkpoint.folder import is_hub_name, model_folder
from engine.config import EngineConfig
from engine.device.limits import BF16_CPU_FEATURES, cpu_count, free_memory, machine_memory
from engine.errors import ConfigError
from server.cli.hub_url import from_url
from server.cli.model_source import check_folder, check_weights
from server.config import ServerConfig
from server.http.listener import ListenError, listen
from server.settings import load

EMPTY: Mapping[str, Any] = MappingProxyType({})
Level = Literal["ok", "warn", "fail"]
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


@dataclass(frozen=True)
class Finding:
    """The result of one check. `fix` is one line of advice, unless `level` is "ok"."""

    name: str
    level: Level
    text: str
    fix: str = ""


def examine(
    config: Path | None, environ: Mapping[str, str], given: Mapping[str, Any] = EMPTY
) -> list[Finding]:
    """Return all findings, in the order in which they are printed.

    `given` are the settings of the command line.
    """
    findings = [*_versions(), *_machine(), _gpu()]
    try:
        server_config, engine_config, warnings = load(given, environ, config)
        usable = _usable(server_config, engine_config)
    except ConfigError as error:
        return [*findings, Finding("settings", "fail", str(error), "correct the named setting")]
    except ImportError as error:  # `_versions` checks only some packages
        return [*findings, Finding("settings", "fail", str(error), "make setup")]
    findings += [Finding("settings", "warn", text, "see `penstock flags`") for text in warnings]
    if not warnings:
        findings.append(Finding("settings", "ok", f"valid{usable}"))
    return [*findings, _port(server_config)]


def _usable(config: ServerConfig, engine_config: EngineConfig) -> str:
    """Describe where the model is. Raises the ConfigError that `serve` raises before loading."""
    from server.cli.pull import is_offline_mode
    from server.http.key_file import check_access
    from server.text.load_template import load_template

    check_access(config)
    folder = _local_folder(engine_config.model)
    draft = engine_config.speculative_model
    draft_folder = _local_folder(draft) if draft else None
    override = Path(config.chat_template) if config.chat_template else None
    if folder or override:
        load_template(folder or Path(engine_config.model), override)
    missing = engine_config.model if folder is None else None
    if draft and draft_folder is None:
        missing = missing or draft
    if missing:
        name = from_url(missing).name
        if is_offline_mode():
            raise ConfigError(
                f"{name} is not in the cache, and HF_HUB_OFFLINE forbids the download; unset it."
            )
        return f"; {name} is not in the cache, `penstock serve` will download it"
    assert folder is not None
    check_weights(engine_config, folder)
    if draft_folder is not None:
        check_weights(engine_config, draft_folder)
        engine_config = replace(engine_config, speculative_model=str(draft_folder))
    check_folder(engine_config, folder)
    return f", with the model in {folder}"


def _local_folder(model: str) -> Path | None:
    """Return the folder of a model, or None if it must be downloaded first."""
    from server.cli.pull import cached

    name = from_url(model).name
    return cached(name) if is_hub_name(name) else model_folder(name)


def render(findings: list[Finding]) -> str:
    return "\n".join(
        f"{finding.level:4}  {finding.name:10}  {finding.text}"
        + (f"\n{'':18}fix: {finding.fix}" if finding.fix else "")
        for finding in findings
    )


def _versions() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    for package in ("penstock", "torch", "tokenizers", "safetensors", "uvicorn"):
        try:
            yield Finding(package, "ok", importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, "fail", "not installed", "make setup")


def _machine() -> Iterator[Finding]:
    facts = _key_values(Path("/proc/cpuinfo"))
    flags = set(facts.get("flags", "").split())
    arm = set(facts.get("Features", "").split())
    present = [feature for feature in CPU_FEATURES if feature in flags]
    name = facts.get("model name") or platform.processor() or platform.machine()
    dtype = "float32" if BF16_CPU_FEATURES.isdisjoint(flags | arm) else "bfloat16"
    text = (
        f"{name}, cores for this process: {cpu_count()}; "
        f"{', '.join(present) or 'features unknown'}; --dtype auto selects {dtype}"
    )
    slow = bool(flags) and "avx2" not in flags
    fix = "this CPU has no AVX2, so the engine is slow; use a newer CPU" if slow else ""
    yield Finding("cpu", "warn" if slow else "ok", text, fix)
    if Path("/proc/meminfo").exists():  # other systems do not report the free memory
        total, free = machine_memory() / 2**30, free_memory() / 2**30
        low = free < 1
        yield Finding(
            "memory",
            "warn" if low else "ok",
            f"{free:.1f} of {total:.1f} GiB available",
            "stop other programs, raise the container's limit, or serve a smaller model"
            if low
            else "",
        )


def _key_values(file: Path) -> dict[str, str]:
    """Parse `key : value` lines of the first record of a file in /proc; {} if it is missing."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines if ":" in line)
    values: dict[str, str] = {}
    for key, _, value in pairs:
        values.setdefault(key.strip(), value.strip())
    return values


def _gpu() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("gpu", "ok", "nvidia-smi not found; the model will run on the CPU")
    query = "--query-gpu=name,memory.total,memory.used,driver_version"
    command = [tool, query, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        text = getattr(error, "stdout", None) or error  # nvidia-smi prints errors to stdout
        return Finding("gpu", "warn", f"nvidia-smi failed: {text}", "check the NVIDIA driver")
    return Finding("gpu", "ok", "; ".join(done.stdout.strip().splitlines()))


def _port(config: ServerConfig) -> Finding:
    try:
        listen(config).close()
    except ListenError as error:
        return Finding("port", "fail", str(error), "penstock serve --port 0")
    return Finding("port", "ok", f"{config.host} port {config.port} is free")
