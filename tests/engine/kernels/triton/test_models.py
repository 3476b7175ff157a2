"""Whole models give the same logits with fused kernels as with torch's separate operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.ops.kernels import use_kernels
from tests.engine.models import (
    test_cohere2,
    test_gemma2,
    test_gemma3,
    test_gpt2,
    test_gpt_neox,
    test_llama,
    test_nanochat,
    test_phi3,
    test_qwen3,
    test_smollm3,
)
from tests.engine.models import test_t5 as t5
from tests.support.forward import forward
from tests.support.golden import Golden, load
from tests.support.interpreter import launches

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
NORM, EMBED, ROTATE = "_norm_kernel", "_gather_kernel", "_rotate_kernel"
ACTIVATE = "_activation_kernel"
# A case for each kind of block, and the kernels that its layers must launch.
CASES = {
    "llama": (test_llama.CASES[0], {NORM, EMBED, ROTATE, ACTIVATE}),
    "qwen3": (test_qwen3.CASE, {NORM, EMBED, ROTATE, ACTIVATE}),
    "gemma2": (test_gemma2.CASE, {NORM, EMBED, ROTATE, ACTIVATE}),
    "gemma3": (test_gemma3.CASE, {NORM, EMBED, ROTATE, ACTIVATE}),
    "cohere2": (test_cohere2.CASE, {NORM, EMBED, ROTATE, ACTIVATE}),
    "gpt2": (test_gpt2.CASES[0], {NORM, EMBED}),
    "gpt-neox": (test_gpt_neox.CASE, {NORM, EMBED, ROTATE}),
    "phi3": (test_phi3.CASE, {NORM, EMBED, ROTATE, ACTIVATE}),
    "smollm3": (test_smollm3.CASE, {NORM, EMBED, ROTATE, ACTIVATE}),
    "nanochat": (test_nanochat.CASES[-1], {NORM, EMBED, ROTATE, ACTIVATE}),
    "t5": (t5.CASES[0], {NORM, EMBED}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.variants(2)
def test_logits_with_kernels_equal_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence decodes while the other prefills three tokens; then one decodes alone."""
    case, due_kernels = CASES[name]
    golden = Golden(case, tmp_path)
    runner = load(golden.folder, attention_backend="torch")
    prompts = [golden.prompts[-1][:4], golden.prompts[-1][4:6]]
    sources = [source[:3] for source in golden.sources[:2]]
    plan = [[(1, 1)], [(1, 1), (0, 3)], [(0, 1)]]
    due = forward(runner, prompts, plan, sources)
    use_kernels(runner.model, "triton")
    counted = launches(monkeypatch)
    found = forward(runner, prompts, plan, sources)
    assert due_kernels <= counted.keys()
    for one, other in zip(found, due, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
