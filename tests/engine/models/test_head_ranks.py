"""Two ranks give the logits and vectors of one: heads of labels, poolings, modules behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cross_encoder_cases import CASES, CrossEncoderCase
from tests.support.driver import Driver
from tests.support.ranks import ranked
from tests.support.sentence_folder import Dense, sentence_folder
from tests.support.tiny_bert import tiny_bert

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = [[7, 3, 9, 4], [5], [8, 8, 1, 2, 6, 5, 4], [*range(4, 40)], [9, 9, 0, 0], [0, 0]]
# Heads that two ranks can share.
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
OF_DISTILBERT = {"dim": 16, "n_heads": 4}
WITH_TYPES = ("Bert", "Gte")
QUICK = ("bert", "modernbert", "qwen3", "yes and no")
NAMES = (
    *("roberta", "xlm-roberta", "distilbert", "mpnet", "gte", "modernbert of the first token"),
    *("llama", "mistral", "three labels", "yes and no, tied", "two tokens", "one token"),
)
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def sized(name: str) -> CrossEncoderCase:
    (case,) = (case for case in CASES if case.name == name)
    own = OF_DISTILBERT if case.family == "DistilBert" else {}
    return replace(case, sizes=case.sizes | SIZES | own)


def outputs(driver: Driver, given: Sequence[dict[str, int]]) -> torch.Tensor:
    """Return the logits or vectors [texts, numbers] of TEXTS, each with its fields."""
    ids = [driver.embed(text, **more) for text, more in zip(TEXTS, given, strict=True)]
    driver.run()
    return torch.stack([driver.vector(request) for request in ids])


def check_two_ranks(
    folder: Path, place: Path, given: Sequence[dict[str, int]] = ({},) * len(TEXTS), **flags: Any
) -> None:
    """Check the outputs of two ranks in steps of few texts, and that texts have different ones."""
    due = outputs(Driver(folder, **flags), given)
    with ranked(folder, place, max_num_encoder_tokens=40, **flags) as driver:
        found = outputs(driver, given)
    assert (found - due).norm() <= 2e-6 * due.norm()
    assert len(due.unique(dim=0)) == len(TEXTS)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES)]
)
def test_two_ranks_score_like_one(name: str, tmp_path: Path) -> None:
    """Of pairs, too, where the model has token types."""
    case = sized(name)
    folder = case.write(tmp_path / "folder")
    seconds = [len(text) // 2 if case.family in WITH_TYPES else 0 for text in TEXTS]
    check_two_ranks(
        folder, tmp_path / "ranks", [{"second": second} for second in seconds], **case.flags
    )


def test_two_ranks_pool_like_one(tmp_path: Path) -> None:
    """By all modes, behind prompts of some texts, through layers and norms."""
    folder = sentence_folder(
        tiny_bert(tmp_path / "plain"),
        tmp_path / "folder",
        {"pooling_mode": list(MODES), "include_prompt": False},
        "Normalize",
        Dense(32 * len(MODES), 8),
        Dense(8, 5, "Identity"),
        "Normalize",
    )
    skips = [{"skip": number % 3 if len(text) > 2 else 0} for number, text in enumerate(TEXTS)]
    check_two_ranks(folder, tmp_path / "ranks", skips)
