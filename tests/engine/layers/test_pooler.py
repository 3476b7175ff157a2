"""The pooler against definitions that take one text after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.checkpoint.sentence_modules import MODES, PoolerConfig
from engine.layers.pooler import Pooler, TextSpans

HIDDEN = 12
LENGTHS = [5, 1, 17, 8, 1]
SKIPPED = [2, 0, 3, 7, 0]


def defined(mode: str, text: torch.Tensor, skip: int) -> torch.Tensor:
    """Return the pooled vector of the states [tokens, hidden] of one text, in fp64."""
    text = text.double()
    numbers = torch.arange(1, len(text) + 1, dtype=torch.float64)
    kept, weights = text[skip:], numbers[skip:, None]
    return {
        "cls": kept[0],
        "max": kept.amax(0),
        "mean": kept.mean(0),
        "mean_sqrt_len_tokens": kept.sum(0) / len(kept) ** 0.5,
        "weightedmean": (kept * weights).sum(0) / weights.sum(),
        "lasttoken": text[-1],
    }[mode]


def pooled(hidden: torch.Tensor, lengths: Any, skipped: Any, **config: Any) -> torch.Tensor:
    return Pooler(PoolerConfig(**config), HIDDEN).pool(hidden, TextSpans.of(lengths, skipped))


def states(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sum(LENGTHS), HIDDEN, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("includes_prompt", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_pool_ragged_texts_equal_the_definition_of_each_mode(
    mode: Any, includes_prompt: bool, dtype: torch.dtype
) -> None:
    hidden = states(dtype)
    found = pooled(hidden, LENGTHS, SKIPPED, modes=(mode,), includes_prompt=includes_prompt)
    assert found.dtype == torch.float32
    skipped = [0] * len(LENGTHS) if includes_prompt else SKIPPED
    for vector, text, skip in zip(found, hidden.split(LENGTHS), skipped, strict=True):
        torch.testing.assert_close(vector.double(), defined(mode, text, skip), rtol=1e-6, atol=1e-6)


def test_pool_several_modes_are_concatenated_in_their_order() -> None:
    modes = ("weightedmean", "cls", "max")
    whole = pooled(states(), LENGTHS, SKIPPED, modes=modes)
    parts = [pooled(states(), LENGTHS, SKIPPED, modes=(mode,)) for mode in modes]
    assert torch.equal(whole, torch.cat(parts, dim=1))


@pytest.mark.parametrize("includes_prompt", [True, False])
def test_pool_text_in_a_batch_equals_the_text_alone_bitwise(includes_prompt: bool) -> None:
    config = {"modes": MODES, "includes_prompt": includes_prompt}
    whole = pooled(states(), LENGTHS, SKIPPED, **config)
    for number, text in enumerate(states().split(LENGTHS)):
        alone = pooled(text, LENGTHS[number : number + 1], SKIPPED[number : number + 1], **config)
        assert torch.equal(alone[0], whole[number])


@pytest.mark.parametrize("mode", MODES)
def test_pool_nan_of_one_token_stays_in_the_vector_of_its_text(mode: Any) -> None:
    """A maximum over NaN may not hide it."""
    hidden = states()
    hidden[[0, 4]] = torch.nan  # the first and the last token of the first text
    found = pooled(hidden, LENGTHS, SKIPPED, modes=(mode,))
    assert found.isnan().all(1).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("cls", "first"), ("lasttoken", "last"), ("mean", "zero"), ("weightedmean", "zero")],
)
def test_pool_text_of_the_prompt_alone_pools_nothing(mode: Any, expected: str) -> None:
    hidden = states()[:4]
    found = pooled(hidden, [4], [9], modes=(mode,), includes_prompt=False)
    due = {"first": hidden[:1], "last": hidden[-1:], "zero": torch.zeros(1, HIDDEN)}
    assert torch.equal(found, due[expected])


def test_forward_normalize_keeps_a_zero_vector() -> None:
    pooler = Pooler(PoolerConfig(("mean",), modules=("normalize",)), HIDDEN)
    vectors = torch.stack([torch.zeros(HIDDEN), torch.full((HIDDEN,), 3.0)])
    assert torch.equal(pooler(vectors), F.normalize(vectors))
    assert not pooler(vectors)[0].any()
