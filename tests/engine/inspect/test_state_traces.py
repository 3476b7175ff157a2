"""The lens of recurrent layers against the states that the references' caches hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.inspect import state_traces
from engine.inspect.lens import look
from engine.protocol.lens import LensRequest, StateTrace
from tests.engine.models import (
    test_granite_hybrid,
    test_lfm2,
    test_llama,
    test_nanochat,
    test_qwen3_5,
)
from tests.support.golden import Golden
from tests.support.lens import run_lens

pytestmark = pytest.mark.usefixtures("one_thread")
CASES = {
    "granite_hybrid": test_granite_hybrid.CASE,
    "qwen3_5": test_qwen3_5.CASE,
    "lfm2": test_lfm2.CASE,
    "nanochat": test_nanochat.CASES[2],
    "llama": test_llama.CASES[0],
}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
TOKENS = [7, 3, 99, 3, 200]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Golden]:
    pytest.importorskip("transformers")

    def load(name: str) -> Golden:
        return Golden(replace(CASES[name], lengths=(1,)), tmp_path_factory.mktemp(name))

    return cache(load)


def traces(golden: Golden, **more: Any) -> list[StateTrace]:
    return run_lens(golden.runner, TOKENS, **more).states


def array(trace: StateTrace, data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float).view(trace.heads, -1)


def caches_of(reference: Any) -> list[Any]:
    """Return the cache of the reference behind each token."""
    texts = [torch.tensor([TOKENS[:end]]) for end in range(1, len(TOKENS) + 1)]
    with torch.inference_mode():
        return [reference(input_ids=text, use_cache=True).past_key_values for text in texts]


def states_of(caches: list[Any], layer: int, part: str) -> list[torch.Tensor]:
    return [getattr(cache.layers[layer], part)[0][0] for cache in caches]


def outputs_of(reference: Any, ending: str) -> dict[str, torch.Tensor]:
    """Return the outputs [tokens, features] of the reference's modules with this name."""
    found = {}
    hooks = [
        module.register_forward_hook(
            lambda _, __, output, name=name: found.update({name: output[0].detach()})
        )
        for name, module in reference.named_modules()
        if name.endswith(ending)
    ]
    with torch.inference_mode():
        reference(input_ids=torch.tensor([TOKENS]))
    for hook in hooks:
        hook.remove()
    return found


def norms_of(states: list[torch.Tensor]) -> torch.Tensor:
    """Return the norms [heads, tokens] of states [heads, ...]."""
    return torch.stack([state.float().flatten(1).norm(dim=1) for state in states], dim=1)


def test_traces_of_mamba_2_are_the_references(golden: Callable[[str], Golden]) -> None:
    reference = golden("granite_hybrid").reference
    found = traces(golden("granite_hybrid"))
    caches = caches_of(reference)
    inputs = outputs_of(reference, "mamba.in_proj")
    assert [(trace.layer, trace.heads) for trace in found] == [(0, 6), (1, 6), (3, 6)]
    for trace in found:
        mamba = reference.model.layers[trace.layer].mamba
        times = F.softplus(
            inputs[f"model.layers.{trace.layer}.mamba.in_proj"][:, -6:] + mamba.dt_bias
        )
        decays = torch.exp(-mamba.A_log.exp() * times)
        states = states_of(caches, trace.layer, "recurrent_states")
        torch.testing.assert_close(array(trace, trace.norms), norms_of(states), **CLOSE)
        torch.testing.assert_close(array(trace, trace.strengths), times.T.detach(), **CLOSE)
        torch.testing.assert_close(array(trace, trace.decays), decays.T.detach(), **CLOSE)


def test_traces_of_the_delta_rule_are_the_references(golden: Callable[[str], Golden]) -> None:
    reference = golden("qwen3_5").reference
    found = traces(golden("qwen3_5"))
    caches = caches_of(reference)
    strengths = outputs_of(reference, "in_proj_b")
    steps = outputs_of(reference, "in_proj_a")
    assert [(trace.layer, trace.heads) for trace in found] == [(0, 4), (1, 4)]
    for trace, (name, b), a in zip(found, strengths.items(), steps.values(), strict=True):
        assert f"layers.{trace.layer}." in name
        layer = reference.get_submodule(name.removesuffix(".in_proj_b"))
        decays = torch.exp(-layer.A_log.exp() * F.softplus(a + layer.dt_bias))
        states = states_of(caches, trace.layer, "recurrent_states")
        torch.testing.assert_close(array(trace, trace.norms), norms_of(states), **CLOSE)
        torch.testing.assert_close(array(trace, trace.strengths), b.sigmoid().T, **CLOSE)
        torch.testing.assert_close(array(trace, trace.decays), decays.T.detach(), **CLOSE)


def test_traces_of_short_convolutions_are_the_kept_inputs(
    golden: Callable[[str], Golden],
) -> None:
    found = traces(golden("lfm2"))
    caches = caches_of(golden("lfm2").reference)
    assert [(trace.layer, trace.heads) for trace in found] == [(0, 1), (1, 1), (3, 1)]
    for trace in found:
        assert trace.strengths == trace.decays == b""
        states = states_of(caches, trace.layer, "conv_states")
        # The reference also keeps the oldest input, which no later token reads.
        kept = [state[:, 1:].flatten()[None] for state in states]
        torch.testing.assert_close(array(trace, trace.norms), norms_of(kept), **CLOSE)


def test_trace_of_the_smear_is_that_of_the_embeddings(golden: Callable[[str], Golden]) -> None:
    (trace,) = traces(golden("nanochat"))
    assert (trace.layer, trace.heads, trace.strengths, trace.decays) == (None, 1, b"", b"")
    module: Any = golden("nanochat").runner.model
    rows = module.embed.weight[TOKENS].double()
    rows = rows / (rows.square().mean(-1, keepdim=True) + module.config.norm_eps).sqrt()
    torch.testing.assert_close(array(trace, trace.norms)[0], rows.norm(dim=1).float(), **CLOSE)


def test_model_without_recurrent_layers_has_no_traces(golden: Callable[[str], Golden]) -> None:
    assert traces(golden("llama")) == []


def test_lens_without_states_has_no_traces(golden: Callable[[str], Golden]) -> None:
    assert traces(golden("lfm2"), states=False) == []


def test_layers_are_those_of_the_model_for_weights_and_traces(
    golden: Callable[[str], Golden],
) -> None:
    runner = golden("granite_hybrid").runner
    result = run_lens(runner, TOKENS, layers=(1, 2))
    assert [(layer.layer, bool(layer.weights)) for layer in result.attention] == [(2, True)]
    kept = [(trace.layer, bool(trace.norms), bool(trace.decays)) for trace in result.states]
    assert kept == [(0, False, False), (1, True, True), (3, False, False)]
    result = run_lens(runner, TOKENS, layers=(0,))
    assert [bool(layer.weights) for layer in result.attention] == [False]


def test_traces_of_a_long_text_are_kept_by_layer(
    golden: Callable[[str], Golden], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = 3 * 4 * 6 * len(TOKENS)
    monkeypatch.setattr(state_traces, "MAX_STATE_BYTES", 3 * one - 1)
    runner = golden("granite_hybrid").runner
    assert [trace.norms for trace in run_lens(runner, TOKENS).states] == [b"", b"", b""]
    some = run_lens(runner, TOKENS, layers=(0, 3)).states
    assert [len(trace.norms) for trace in some] == [one // 3, 0, one // 3]
    *_, result = look(runner, LensRequest(7, TOKENS, layers=(0, 1, 3)))
    assert result is not None
    assert (result.error, result.states) == ("large", [])
