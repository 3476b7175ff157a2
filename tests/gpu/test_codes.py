"""Quantised weights on a GPU: the kernel equals torch, and answers do not depend on graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.layers.weights.code_rows import code_rows
from engine.ops.codes import Quantization, codes_linear
from tests.support.driver import Driver, tiny_llama
from tests.support.tolerances import check

pytestmark = pytest.mark.gpu
KINDS: list[Quantization] = ["int8", "int4", "fp8"]
kinds = pytest.mark.parametrize("kind", KINDS)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 300])
def test_codes_kernel_equals_torch(
    cuda: str, rows: int, dtype: torch.dtype, kind: Quantization
) -> None:
    inputs, outputs = 1184, 1000
    weight = code_rows((draw(outputs, inputs) / inputs**0.5).to(cuda), kind)
    x, bias = draw(rows, inputs, seed=1).to(cuda, dtype), draw(outputs, seed=2).to(cuda, dtype)
    due = x.double() @ weight.dequantize().to(dtype).double().t() + bias.double()
    found = codes_linear(x, weight, bias, kernels="triton")
    check(found, due.to(dtype))
    if rows <= 16:
        alone = codes_linear(x[-1:], weight, bias, kernels="triton")
        assert torch.equal(alone, found[-1:])


@kinds
def test_weights_rounded_on_a_gpu_have_the_codes_of_the_definition(
    cuda: str, kind: Quantization
) -> None:
    weight = draw(50, 640)
    found, due = code_rows(weight.to(cuda), kind), code_rows(weight, kind)
    assert torch.equal(found.codes.cpu(), due.codes)
    assert torch.equal(found.scales.cpu(), due.scales)


@kinds
def test_answers_with_graphs_equal_those_without(
    cuda: str, tmp_path: Path, kind: Quantization
) -> None:
    model = tiny_llama(tmp_path / "model", hidden_size=64, intermediate_size=96)
    fields: dict[str, Any] = {
        "device": cuda,
        "quantization": kind,
        "kv_cache_memory_bytes": 64 << 20,
    }
    prompts = [[7 * n + i for i in range(20 + n)] for n in range(5)]
    seen = []
    for config in ({"enforce_eager": True}, {"depth": 1}):
        driver = Driver(model, **fields, **config)
        ids = [driver.submit(prompt, 16) for prompt in prompts]
        driver.run()
        seen.append([driver.tokens(each) for each in ids])
        facts = driver.core.facts
        assert facts.quantization == kind
        weights = [entry for entry in facts.memory if "weights" in entry.name]
        assert [entry.planned for entry in weights] == [entry.measured for entry in weights]
    assert seen[0] == seen[1]
