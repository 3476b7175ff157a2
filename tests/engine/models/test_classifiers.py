"""Models with a head of labels against transformers, and heads that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from tests.support.cross_encoder_cases import HEADS, OF_DECODER, CrossEncoderCase
from tests.support.driver import Driver
from tests.support.encoders import check_exact
from tests.support.golden import load

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = [[7, 3, 9, 4], [5], [8, 8, 1, 2, 6, 5, 4], [*range(4, 40)], [9, 9, 0, 0], [0, 0]]
OF_MODERNBERT = {"classifier_bias": True, "classifier_pooling": "mean", "norm_bias": True}
CASES = [
    CrossEncoderCase("bert", "Bert", labels=3),
    CrossEncoderCase("camembert", "Camembert", {"type_vocab_size": 1}, labels=2),
    CrossEncoderCase("modernbert", "ModernBert", OF_MODERNBERT | {"classifier_activation": "relu"}),
    CrossEncoderCase("mistral", "Mistral", OF_DECODER | {"sliding_window": 5}, labels=2),
    CrossEncoderCase("qwen2", "Qwen2", {"num_key_value_heads": 1}, labels=3),
    CrossEncoderCase("qwen3", "Qwen3", OF_DECODER),
]


def case_of(case: CrossEncoderCase) -> Any:
    marks = () if case.name in ("bert", "qwen3") else (pytest.mark.slow,)
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", list(map(case_of, CASES)))
def test_logits_equal_those_of_transformers_alone_and_in_a_batch(
    case: CrossEncoderCase, tmp_path: Path
) -> None:
    """Padding tokens at the end of a text are passed over by decoders alone."""
    import transformers

    folder = case.write(tmp_path / "folder")
    model = getattr(transformers, f"{case.family}ForSequenceClassification")
    reference = model.from_pretrained(folder).double().eval()
    for budget in (1, 1000):
        driver = Driver(folder, max_num_encoder_tokens=budget)
        facts = driver.core.facts
        assert (facts.kind, facts.num_labels) == ("encoder", case.labels)
        ids = [driver.embed(text) for text in TEXTS]
        driver.run()
        for number, text in zip(ids, TEXTS, strict=True):
            with torch.inference_mode():
                mask = torch.ones(1, len(text), dtype=torch.int64)
                due = reference(torch.tensor([text]), attention_mask=mask).logits[0]
            check_exact(driver.vector(number), due)


def edited(case: CrossEncoderCase, folder: Path, damage: str) -> str:
    """Damage a checkpoint's head, and return what an error must name."""
    case.write(folder)
    last = HEADS.get(case.family, "classifier") + ".weight"
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if damage == "missing":
        tensors.pop(last)
    elif damage == "not finite":
        tensors[last] = torch.full_like(tensors[last], torch.nan)
    else:
        config = json.loads((folder / "config.json").read_text())
        config["id2label"] = {str(n): f"LABEL_{n}" for n in range(case.labels + 1)}
        (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, path)
    return last.removesuffix(".weight")


@pytest.mark.parametrize("damage", ["missing", "not finite", "wrong size"])
@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=lambda case: case.name)
def test_load_head_that_does_not_fit_raises_config_error(
    case: CrossEncoderCase, tmp_path: Path, damage: str
) -> None:
    named = edited(case, tmp_path / "folder", damage)
    with pytest.raises(ConfigError, match=named):
        load(tmp_path / "folder")
    with pytest.raises(ConfigError, match="own head"):
        load(case.write(tmp_path / "whole"), pooling="mean")
