"""A norm that adds up the ranks' parts before it gives the same answers as layers that do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.memory.model_plan import ModelPlan
from engine.models.base import fold_sums
from tests.support.driver import tiny_llama
from tests.support.ranks import ranked

PROMPTS = ([1, 2, 3] * 9, [4], [5, 6, 7, 8])


def answers(model: Path, place: Path, size: int, **config: Any) -> list[tuple[list[int], Any]]:
    """Return tokens and logprobs of each prompt."""
    with ranked(model, place, size, **config) as driver:
        ids = [driver.submit(prompt, 8, logprobs=1) for prompt in PROMPTS]
        driver.run()
        return [(driver.tokens(each), driver.logprobs(each)) for each in ids]


@pytest.mark.parametrize(("size", "heads"), [(2, 2), (3, 3)])
def test_folded_sums_have_the_bits_of_sums_in_layers(
    size: int, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = {"hidden_size": 16 * heads, "intermediate_size": 24 * heads}
    widths |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    model = tiny_llama(tmp_path / "model", **widths)
    folded: list[ModelPlan] = []

    def fold(plan: ModelPlan) -> None:
        fold_sums(plan.model, plan.ranks)
        folded.append(plan)

    due = answers(model, tmp_path / "one", size)
    monkeypatch.setattr("engine.runner.load._start_rank_sums", fold)
    assert answers(model, tmp_path / "other", size) == due
    assert len(folded) == size
    for plan in folded:
        layers = [layer for layer in plan.module.modules() if isinstance(layer, Linear)]
        norms = [norm for norm in plan.module.modules() if isinstance(norm, RMSNorm)]
        assert sum(layer.leaves_sum for layer in layers) == 2 * len(plan.attention_specs)
        assert all(norm.delta_ranks is plan.ranks for norm in norms)
