"""Adapters of fused and transposed layers: the answers are those of the model they are folded into.

Folding knows only the tensors of the checkpoint, and nothing of how our layers stack them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.offline.merge.merge import merge
from engine.offline.merge.recipe import parse
from engine.protocol.adapters import AdapterLoaded, LoadAdapter
from tests.engine.models import (
    test_gpt_neox,
    test_granite_hybrid,
    test_lfm2,
    test_mixtral,
    test_phi3,
    test_qwen3_5,
    test_qwen3_next,
)
from tests.support.adapters import PREFIX, write_adapter
from tests.support.driver import MODES, Driver
from tests.support.golden import of_transformers
from tests.support.ranks import ranked

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [3, 141, 59, 26, 53, 58, 97, 93]


def gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(vocab_size=211, n_embd=48, n_layer=2, n_head=6, n_positions=128)


def base_and_adapter(folder: Path, config: Any, *, is_turned: bool) -> tuple[Path, Path]:
    """Write a model, and an adapter of every matrix in its blocks that is no router or expert."""
    of_transformers(config, folder / "base")
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, weight in load_file(folder / "base" / "model.safetensors").items():
        if weight.dim() != 2 or not any(character.isdigit() for character in name):
            continue
        if any(part in name for part in (".experts.", ".gate.", ".router.")):
            continue
        rows, columns = weight.shape
        outputs, inputs = (columns, rows) if is_turned else (rows, columns)
        module = PREFIX + name.removesuffix(".weight")
        tensors[f"{module}.lora_A.weight"] = torch.randn(4, inputs, generator=generator)
        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) * 0.05
    adapter = write_adapter(folder / "adapter", tensors, lora_alpha=4, fan_in_fan_out=is_turned)
    return folder / "base", adapter


def answer(driver: Driver, adapter: int = 0) -> tuple[list[int], list[float]]:
    request_id = driver.submit(PROMPT, 8, adapter=adapter, logprobs=0)
    driver.run()
    return driver.tokens(request_id), driver.logprobs(request_id)


@pytest.mark.parametrize(
    ("config", "is_turned", "mode"),
    [
        (test_phi3.config, False, "synchronous"),
        (test_gpt_neox.config, False, "captured"),
        (gpt2, True, "captured"),
        (test_mixtral.config, False, "synchronous"),
        (test_granite_hybrid.EXPERTS.config, False, "synchronous"),
        (test_lfm2.config, False, "captured"),
        (test_qwen3_next.config, False, "synchronous"),
        (test_qwen3_5.config, False, "synchronous"),
    ],
    ids=[
        *("phi3", "gpt-neox", "gpt2", "mixtral"),
        *("granite-hybrid", "lfm2", "qwen3-next", "qwen3-5"),
    ],
)
@pytest.mark.variants(2)
def test_adapter_of_stacked_layers_answers_as_the_folded_model(
    tmp_path: Path, config: Callable[[], Any], is_turned: bool, mode: str
) -> None:
    pytest.importorskip("transformers")
    base, adapter = base_and_adapter(tmp_path, config(), is_turned=is_turned)
    recipe = {"merge_method": "lora", "base_model": str(base), "adapter": str(adapter)}
    merge(parse(recipe), tmp_path / "folded", lambda share: None)
    tokens, logprobs = answer(Driver(tmp_path / "folded"))
    driver = Driver(base, lora_modules=(f"a={adapter}",), **MODES[mode])
    found = answer(driver, 1)
    assert found[0] == tokens
    assert found[1] == pytest.approx(logprobs, abs=2e-4)
    assert answer(driver)[1] != pytest.approx(logprobs, abs=1e-2)


@pytest.mark.parametrize(
    ("config", "is_turned"),
    [
        pytest.param(gpt2, True, id="gpt2"),
        pytest.param(test_gpt_neox.config, False, id="gpt-neox", marks=pytest.mark.slow),
        pytest.param(test_phi3.config, False, id="phi3", marks=pytest.mark.slow),
        pytest.param(test_qwen3_next.config, False, id="qwen3-next", marks=pytest.mark.slow),
        pytest.param(test_qwen3_5.config, False, id="qwen3-5", marks=pytest.mark.slow),
    ],
)
def test_adapter_of_stacked_layers_that_ranks_share_answers_as_with_one(
    tmp_path: Path, config: Callable[[], Any], is_turned: bool
) -> None:
    """Rows of fused tensors are reordered before they are shared; sums have a bias."""
    pytest.importorskip("transformers")
    base, adapter = base_and_adapter(tmp_path, config(), is_turned=is_turned)
    modules = (f"a={adapter}",)
    alone = Driver(base, lora_modules=modules)
    due = [answer(alone, adapter) for adapter in (1, 0)]
    with ranked(base, tmp_path / "place", lora_modules=modules) as driver:
        for adapter, (tokens, logprobs) in zip((1, 0), due, strict=True):
            found = answer(driver, adapter)
            assert found[0] == tokens
            assert found[1] == pytest.approx(logprobs, abs=2e-4)


def test_adapter_of_experts_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    base, _ = base_and_adapter(tmp_path, test_mixtral.config(), is_turned=False)
    module = f"{PREFIX}model.layers.0.block_sparse_moe.experts.0.w1"
    weights = {"lora_A": torch.ones(4, 48), "lora_B": torch.ones(64, 4)}
    tensors = {f"{module}.{half}.weight": value for half, value in weights.items()}
    driver = Driver(base, max_loras=1)
    driver.inbox.append(LoadAdapter(9, 1, str(write_adapter(tmp_path / "experts", tensors))))
    driver.run()
    [loaded] = [message for message in driver.sent if isinstance(message, AdapterLoaded)]
    assert "experts.0.w1, which is no linear layer of this model" in loaded.problem
