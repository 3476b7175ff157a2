"""Facts about the CPU, the GPU and the memory that the engine detects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.device import facts as platform

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("allowed", "features", "dtype", "expected"),
    [
        (None, {"amx_bf16"}, torch.bfloat16, True),
        ("DEFAULT", {"amx_bf16"}, torch.bfloat16, True),
        ("avx512_core_amx", {"amx_bf16"}, torch.bfloat16, True),
        ("AVX512_CORE_BF16", {"amx_bf16"}, torch.bfloat16, False),
        (None, {"avx512_bf16"}, torch.bfloat16, False),
        (None, {"amx_bf16"}, torch.float32, False),
    ],
)
def test_multiplies_in_amx_needs_feature_bf16_and_permission(
    monkeypatch: pytest.MonkeyPatch,
    allowed: str | None,
    features: set[str],
    dtype: torch.dtype,
    expected: bool,
) -> None:
    monkeypatch.setattr(platform, "_cpu_features", lambda: features)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if allowed is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", allowed)
    assert platform.uses_amx(CPU, dtype) is expected
    assert not platform.uses_amx(torch.device("cuda"), dtype)


@pytest.mark.parametrize(
    ("device", "dtype", "packed", "threads", "version", "expected"),
    [
        ("cpu", torch.bfloat16, True, 2, "v3.12.0", None),
        ("cpu", torch.float32, True, 2, "v3.12.0", None),
        ("cpu", torch.float32, True, 2, "v3.7.1", "onednn"),
        ("cpu", torch.float32, True, 1, "v3.7.1", None),
        ("cpu", torch.bfloat16, True, 2, "v3.7.1", None),
        ("cpu", torch.float32, False, 1, "v3.12.0", "unpacked"),
        ("cuda", torch.float32, False, 2, "v3.7.1", "gpu"),
    ],
)
def test_depends_on_rows_returns_the_cause(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    packed: bool,
    threads: int,
    version: str,
    expected: str | None,
) -> None:
    built = f"PyTorch built with:\n  - Intel(R) MKL-DNN {version} (Git Hash 1234)\n"
    monkeypatch.setattr(torch.__config__, "show", lambda: built)
    monkeypatch.setattr(platform, "_cpu_features", lambda: {"avx512_bf16"})
    facts = {"packed": packed, "threads": threads}
    assert platform.batch_variance_of(torch.device(device), dtype, **facts) == expected
    monkeypatch.setattr(platform, "_cpu_features", lambda: {"amx_bf16"})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "DEFAULT")
    amx = device == "cpu" and dtype == torch.bfloat16
    assert platform.batch_variance_of(torch.device(device), dtype, **facts) == (
        "amx" if amx else expected
    )


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (None, "AVX512_CORE_BF16"),
        ("DEFAULT", "AVX512_CORE_BF16"),
        ("AVX512_CORE_AMX", "AVX512_CORE_BF16"),
        ("AVX512_CORE_BF16", "AVX512_CORE_BF16"),
        ("AVX2", "AVX2"),
    ],
)
def test_forbid_amx_lowers_the_limit_of_onednn_only_if_needed(
    monkeypatch: pytest.MonkeyPatch, given: str | None, left: str
) -> None:
    monkeypatch.setattr(platform, "_cpu_features", lambda: {"amx_bf16", "avx512_bf16"})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", given or "")
    if given is None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    platform.forbid_amx()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == left
    assert not platform.uses_amx(torch.device("cpu"), torch.bfloat16)


def test_onednn_reads_its_limit_after_torch_is_imported() -> None:
    """So the engine, which imports torch before it reads its configuration, can set the limit."""
    ran = subprocess.run(
        [sys.executable, "-c", MULTIPLY],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "DEFAULT", "ONEDNN_VERBOSE": "1"},
        capture_output=True,
        text=True,
    )
    assert "isa:Intel AVX2\n" in ran.stdout, ran.stdout + ran.stderr


MULTIPLY = """
import os
import subprocess
import sys
import torch
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(64, 64), 32)
torch.ops.mkldnn._linear_pointwise(torch.ones(64, 64), weight, None, "none", [], "")
"""


def test_onednn_version_is_found_in_torch_config() -> None:
    """Torch gives the version only in a text meant for people."""
    found = platform._onednn_version()
    assert (found > (3, 0)) == torch.backends.mkldnn.is_available()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize(
    ("allowed", "features", "has_bf16", "expected"),
    [
        ("DEFAULT", {"avx512f", "avx512_bf16"}, True, False),
        ("AVX512_CORE_BF16", {"avx512f", "amx_bf16"}, True, False),
        ("AVX512_CORE", {"avx512f", "avx512_bf16"}, True, True),
        ("DEFAULT", {"avx512f"}, True, True),
        ("DEFAULT", {"avx2"}, False, False),
    ],
)
def test_onednn_emulates_bf16_on_avx512_without_it(
    monkeypatch: pytest.MonkeyPatch,
    allowed: str,
    features: set[str],
    has_bf16: bool,
    expected: bool,
) -> None:
    monkeypatch.setattr(platform, "_cpu_features", lambda: features)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", allowed)
    assert platform.onednn_emulates_bf16(CPU, torch.bfloat16) is expected
    assert not platform.onednn_emulates_bf16(CPU, torch.float32)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("has_bf16", [True, False])
def test_onednn_bf16_depends_on_the_cpu(monkeypatch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    assert platform.onednn_has_matmul(CPU, torch.float32)
    assert platform.onednn_has_matmul(CPU, torch.bfloat16) is has_bf16
    assert platform.emulates_bf16(CPU, torch.bfloat16) is not has_bf16
    assert not platform.emulates_bf16(CPU, torch.float32)
    gpu = torch.device("cuda")
    assert not platform.onednn_has_matmul(gpu, torch.bfloat16)
    assert not platform.emulates_bf16(gpu, torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)]
)
def test_select_dtype_gpu_emulating_bf16_uses_fp32(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    """torch counts emulation as support, but Triton cannot emulate bf16 products."""

    def is_supported(including_emulation: bool = True) -> bool:
        return including_emulation or capability >= (8, 0)

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert platform.select_dtype("auto", torch.device("cuda")) == dtype


@pytest.mark.parametrize(
    ("limit", "used", "files", "free"),
    [(8, 7, 4, 5), (8, 7, 0, 1), (8, 9, 0, 0), ("max", 7, 4, 40), (100, 7, 4, 40)],
)
def test_available_memory_in_container_respects_its_limit(
    monkeypatch: pytest.MonkeyPatch, limit: int | str, used: int, files: int, free: int
) -> None:
    """The page cache, such as a checkpoint just read, counts as free."""
    gib = 2**30
    there = {
        "/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {40 * gib // 1024} kB\n",
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": str(limit if limit == "max" else int(limit) * gib) + "\n",
        "/sys/fs/cgroup/memory.current": f"{used * gib}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 5\nactive_file {files * gib}\ninactive_file 0\n",
    }

    def read(path: Path, **_: str) -> str:
        if str(path) not in there:
            raise FileNotFoundError(path)
        return there[str(path)]

    monkeypatch.setattr(Path, "exists", lambda path: str(path) in there)
    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(os, "sysconf", lambda name: 2**13 if name == "SC_PAGE_SIZE" else 2**23)
    assert platform.available_memory(CPU) == free * gib
