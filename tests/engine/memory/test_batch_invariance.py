"""On a CPU with AMX a row's bits are kept if our own kernel multiplies in tiles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine.attention.numba import NumbaBackend
from engine.config import EngineConfig
from engine.device import facts
from engine.errors import ConfigError
from engine.kernels.numba import linear
from engine.kernels.numba.cpu import has_avx512_bf16
from engine.kernels.numba.tiles import TileChecks
from engine.memory.batch_invariance import amx_note, keeps_order, multiplies_in_tiles
from engine.memory.model_plan import ModelPlan
from tests.support.driver import Driver, tiny_llama

CPU = torch.device("cpu")


@pytest.fixture
def on_amx(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pretend to have AMX, which oneDNN may use; our kernels multiply in emulated tiles."""
    checks = TileChecks()
    # oneDNN reads its limit at its first product: before the limit is changed here.
    torch.ops.mkldnn._linear_pointwise(torch.ones(2, 2), torch.ones(2, 2), None, "none", [], "")
    monkeypatch.setattr(facts, "_cpu_features", lambda: {"amx_bf16", "avx512_bf16"})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "DEFAULT")
    monkeypatch.setattr(linear, "EMULATES_TILES", True)
    monkeypatch.setattr(linear, "tiles_problem", lambda: None)
    monkeypatch.setattr(linear, "tile_checks", lambda: checks)
    return monkeypatch


def plan_of(folder: Path, choice: str, **config: str) -> ModelPlan:
    fields = {"dtype": "bfloat16", "device": "cpu", "batch_invariant": choice} | config
    return ModelPlan(EngineConfig(model=str(folder), **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", ["auto", "on"])
def test_plan_with_tiles_keeps_bits_and_limits_onednn_and_attention(
    checkpoint: Path, on_amx: pytest.MonkeyPatch, choice: str
) -> None:
    assert facts.fuses_chunks(CPU)
    plan = plan_of(checkpoint, choice)
    assert plan.batch_variance is None
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert isinstance(plan.backend, NumbaBackend)
    assert not plan.backend.reads_masked_keys, "torch's attention would compute chunks"


def test_plan_with_tiles_and_no_promise_uses_all_of_amx(
    checkpoint: Path, on_amx: pytest.MonkeyPatch
) -> None:
    plan = plan_of(checkpoint, "off")
    assert plan.batch_variance == "amx"
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "DEFAULT"
    assert plan.backend.reads_masked_keys


@pytest.mark.parametrize("why", ["refused", "torch"])
def test_plan_without_tiles_takes_amx_of_onednn_unless_forbidden(
    checkpoint: Path, on_amx: pytest.MonkeyPatch, why: str
) -> None:
    """Because Linux refuses tiles, or because torch multiplies."""
    config = {"attention_backend": "torch"} if why == "torch" else {}
    if why == "refused":
        on_amx.setattr(linear, "tiles_problem", lambda: "Linux refuses")
    plan = plan_of(checkpoint, "auto", **config)
    assert plan.batch_variance == "amx"
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "DEFAULT"
    assert amx_note(plan.dtype, plan.kernels) == ("Linux refuses" if why == "refused" else "")
    assert plan_of(checkpoint, "on", **config).batch_variance is None


def test_plan_invariance_that_cannot_be_had_is_refused_with_tiles(
    checkpoint: Path, on_amx: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="use --prepack"):
        ModelPlan(
            EngineConfig(
                model=str(checkpoint),
                dtype="bfloat16",
                device="cpu",
                batch_invariant="on",
                prepack=False,
            )
        )


def test_tiles_are_for_bf16_and_our_own_kernels(on_amx: pytest.MonkeyPatch) -> None:
    assert multiplies_in_tiles(torch.bfloat16, "numba")
    assert not multiplies_in_tiles(torch.float32, "numba")
    assert not multiplies_in_tiles(torch.bfloat16, "torch")
    assert amx_note(torch.bfloat16, "numba") == ""
    assert [keeps_order("auto", in_tiles=own) for own in (False, True)] == [False, True]
    assert not keeps_order("off", in_tiles=True)


@pytest.mark.skipif(not has_avx512_bf16(), reason="this CPU does not multiply bf16 (AVX512_BF16)")
@pytest.mark.variants(1)
@pytest.mark.parametrize("hidden", [32, 64], ids=["padded", "packed"])
def test_engine_in_emulated_tiles_bits_of_a_prompt_ignore_the_crowd(
    tmp_path: Path, on_amx: pytest.MonkeyPatch, hidden: int
) -> None:
    """Prompts of several lengths, whole or in chunks, with decodes of others in their steps.

    oneDNN has panels for layers of 64 outputs, and none for those of 32.
    """
    folder = tiny_llama(tmp_path / "model", hidden_size=hidden, intermediate_size=2 * hidden)
    names: list[str] = []
    on_amx.setattr(linear, "kernel_store", lambda: _Listing(names, store()))
    settings = {"dtype": "bfloat16", "block_size": 16}
    crowd = Driver(folder, max_num_batched_tokens=24, **settings)
    alone = Driver(folder, **settings)
    assert crowd.core.facts.batch_variance is None
    assert crowd.core.facts.amx_note == ""
    assert set(names) == {"linear_tiles.tiles_kernel"}
    prompts = [[(7 * i * n) % 590 for i in range(n)] for n in (1, 15, 16, 17, 33, 50)]
    ids = [crowd.submit(prompt, 6, logprobs=2, prompt_logprobs=2) for prompt in prompts]
    crowd.run()
    for request, prompt in zip(ids, prompts, strict=True):
        same = alone.submit(prompt, 6, logprobs=2, prompt_logprobs=2)
        alone.run()
        assert _logprobs(crowd, request) == _logprobs(alone, same)


def store() -> object:
    from engine.kernels.numba.machine_code import kernel_store

    return kernel_store()


class _Listing:
    """A store that lists the names of the kernels that are requested."""

    def __init__(self, names: list[str], kernels: object) -> None:
        self._names, self._kernels = names, kernels

    def address(self, name: str, *shape: int) -> int:
        self._names.append(name)
        return self._kernels.address(name, *shape)  # type: ignore[attr-defined, no-any-return]


def _logprobs(driver: Driver, request: int) -> list[object]:
    outputs = driver.outputs[request]
    return [(output.token, output.logprobs, output.prompt_logprobs) for output in outputs]
