"""Models whose decoder layers are folded, against the torch backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.kernels.triton import chips
from engine.kernels.triton.chips import Features
from engine.layers.folded import takes_rows
from engine.models.llama import Llama
from engine.ops.kernels import use_kernels
from engine.protocol.generate import Ablation
from tests.support.driver import Driver, tiny_llama
from tests.support.forward import forward
from tests.support.golden import load
from tests.support.interpreter import launches
from tests.support.program_order import program_order
from tests.support.tiny_qwen3 import tiny_qwen3

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
ALL = Features(folded=True, early_weights=True, split_inputs=True)
PROMPTS = [[5, 60, 7, 9, 11], [3, 2]]
# One sequence decodes while the other prefills four tokens; then both decode.
PLAN = [[(1, 1)], [(1, 1), (0, 4)], [(0, 1)]]
FOLDED, NORM, ACTIVATE = "folded_linear_kernel", "_norm_kernel", "_activation_kernel"
LAYERS = 2
MODELS: dict[str, Any] = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
}


@pytest.fixture(autouse=True)
def _table() -> Iterator[None]:
    yield
    chips.force(None)


def error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the size of the differences, relative to that of the logits."""
    return float((logits - exact).std() / exact.std())


@pytest.mark.variants(1)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_of_folded_model_equal_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as near to torch's logits in fp32 as with today's kernels.

    In bf16 the interpreter's kernels are further away than torch, because it truncates.
    """
    folder = MODELS[name](tmp_path)
    runner = load(folder, attention_backend="torch", dtype="bfloat16", prepack=False)
    due = forward(runner, PROMPTS, PLAN)
    exact = forward(load(folder, attention_backend="torch"), PROMPTS, PLAN)
    use_kernels(runner.model, "triton")
    today = forward(runner, PROMPTS, PLAN)
    chips.force(ALL)
    counted = launches(monkeypatch)
    found = forward(runner, PROMPTS, PLAN)
    steps = len(PLAN)
    assert counted[FOLDED] == steps * (4 * LAYERS + 1), "the head is one more"
    assert counted[NORM] == steps, "only the last norm is alone"
    assert counted[ACTIVATE] == 0
    one, other, unfolded, true = (torch.cat(each) for each in (found, due, today, exact))
    assert torch.equal(one.argmax(1), other.argmax(1))
    assert error(one, other) < 0.03
    assert error(one, true) < 1.3 * error(unfolded, true)
    with program_order(7):
        again = forward(runner, PROMPTS, PLAN)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_greedy_tokens_of_folded_model_equal_torch(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, num_hidden_layers=1)
    answers = []
    for backend in ("torch", "triton"):
        chips.force(ALL if backend == "triton" else None)
        driver = Driver(folder, attention_backend=backend, dtype="bfloat16", prepack=False, depth=1)
        if backend == "triton":
            use_kernels(driver.runner.model, "triton")
        ids = [driver.submit(prompt, 4) for prompt in PROMPTS]
        driver.run()
        answers.append([driver.tokens(i) for i in ids])
    assert answers[0] == answers[1]


def test_ablation_of_folded_model_is_computed_op_by_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ablation changes what passes the `add` of a norm, which folded layers do not call."""
    folder = tiny_llama(tmp_path, num_hidden_layers=1)
    ablated: list[list[int]] = []
    for backend in ("torch", "triton"):
        chips.force(ALL if backend == "triton" else None)
        driver = Driver(folder, attention_backend=backend, dtype="bfloat16", prepack=False, depth=0)
        use_kernels(driver.runner.model, backend)
        counted = launches(monkeypatch)
        found = []
        for ablation in (None, Ablation(layers=(0,))):
            counted.clear()
            request_id = driver.submit([5, 60, 7], 2, ablation=ablation)
            driver.run()
            found.append(driver.tokens(request_id))
            if backend == "triton":
                assert bool(counted[ACTIVATE]) == (ablation is not None)
        assert found[0] != found[1]
        ablated.append(found[1])
    assert ablated[0] == ablated[1]


@pytest.mark.parametrize("change", ["rows", "fp32", "packed", "ablation"])
def test_other_layers_are_not_folded(change: str, tmp_path: Path) -> None:
    dtype = "float32" if change == "fp32" else "bfloat16"
    model: Any = load(tiny_llama(tmp_path), attention_backend="torch", dtype=dtype).model
    if change != "packed":
        model = load(tmp_path, attention_backend="torch", dtype=dtype, prepack=False).model
    use_kernels(model, "triton")
    chips.force(ALL)
    ids = torch.zeros(65 if change == "rows" else 64, dtype=torch.int64)
    batch: Any = SimpleNamespace(input_ids=ids, adds_apart=change == "ablation", seen=None)
    assert isinstance(model, Llama)
    assert not (takes_rows(model.embed, batch) and model._foldable())
    if change == "ablation":
        batch.adds_apart = False
        assert takes_rows(model.embed, batch)
        assert model._foldable()
        chips.force(None)
        assert not takes_rows(model.embed, batch)
