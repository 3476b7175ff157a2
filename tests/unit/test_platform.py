"""What is known of the CPU the engine runs on."""

from __future__ import annotations

import pytest
import torch

from engine import platform

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
def test_amx(
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
    assert platform.multiplies_in_amx(CPU, dtype) is expected
    assert not platform.multiplies_in_amx(torch.device("cuda"), dtype)


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)]
)
def test_a_gpu_that_only_emulates_bf16_computes_in_fp32(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    """torch counts emulation as support, Triton has no products of it."""

    def is_supported(including_emulation: bool = True) -> bool:
        return including_emulation or capability >= (8, 0)

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert platform.select_dtype("auto", torch.device("cuda")) == dtype
