"""Texts through a whole engine: modules behind the pooling, prompts, pairs, and a model's head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from tests.support.driver import EAGER, Driver, each
from tests.support.golden import load
from tests.support.sentence_folder import Dense, sentence_folder
from tests.support.tiny_bert import tiny_bert

pytestmark = pytest.mark.usefixtures("one_thread")
HIDDEN = 32
TEXTS = [[7, 3, 9, 4], [5], [8, 8, 1, 2, 6, 5, 4]]
DENSE = Dense(2 * HIDDEN, 5)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("checkpoints") / "tiny-bert")


def vectors(folder: Path, texts: list[list[int]], **config: Any) -> list[torch.Tensor]:
    """Return the vectors of texts, which begin with a prompt of two tokens."""
    driver = Driver(folder, **config)
    ids = [driver.embed(text, skip=2 if len(text) > 2 else 0) for text in texts]
    driver.run()
    return [driver.vector(number) for number in ids]


@pytest.mark.parametrize("mode", each(EAGER))
def test_embed_modules_behind_the_pooling_follow_in_their_order(
    bert: Path, tmp_path: Path, mode: dict[str, Any]
) -> None:
    pooling = {"pooling_mode": ["cls", "mean"], "include_prompt": False}
    folder = sentence_folder(bert, tmp_path / "st", pooling, "Normalize", DENSE, "Normalize")
    linear = load_file(folder / "3_Dense" / "model.safetensors")
    plain = sentence_folder(bert, tmp_path / "plain", pooling)
    found = vectors(folder, TEXTS, max_num_encoder_tokens=6, **mode)
    for vector, pooled in zip(found, vectors(plain, TEXTS, **mode), strict=True):
        unit = pooled / pooled.norm()
        # The last Normalize is left to the server.
        due = torch.tanh(linear["linear.weight"] @ unit + linear["linear.bias"])
        torch.testing.assert_close(vector, due, rtol=1e-5, atol=1e-6)


def test_embed_dense_is_counted_and_stays_fp32(bert: Path, tmp_path: Path) -> None:
    """A linear layer that rounds its 64 inputs to bf16 is off by more."""
    pooling = {"pooling_mode": ["max", "mean"]}
    folder = sentence_folder(bert, tmp_path / "st", pooling, DENSE)
    plain = sentence_folder(bert, tmp_path / "plain", pooling)
    driver, without = (Driver(each, dtype="bfloat16") for each in (folder, plain))
    extra = (DENSE.inputs + 1) * DENSE.outputs
    assert driver.core.facts.parameters - without.core.facts.parameters == extra
    assert driver.core.facts.weight_bytes - without.core.facts.weight_bytes == 4 * extra
    assert driver.core.facts.embedding_size == DENSE.outputs
    linear = load_file(folder / "2_Dense" / "model.safetensors")
    pooled = vectors(plain, TEXTS[:1], dtype="bfloat16")[0]
    due = torch.tanh(linear["linear.weight"] @ pooled + linear["linear.bias"])
    found = vectors(folder, TEXTS[:1], dtype="bfloat16")[0]
    torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-6)


def test_embed_in_batch_equals_alone_bitwise_behind_dense(bert: Path, tmp_path: Path) -> None:
    folder = sentence_folder(bert, tmp_path / "st", {"pooling_mode": ["cls", "mean"]}, DENSE)
    texts = [[token % 200 for token in range(n, 2 * n)] for n in range(1, 40)]
    driver = Driver(folder, max_num_encoder_tokens=1000)
    ids = [driver.embed(text) for text in texts]
    driver.run()
    for number, text in zip(ids, texts, strict=True):
        alone = driver.embed(text)
        driver.run()
        assert torch.equal(driver.vector(alone), driver.vector(number))


def wrong_size(folder: Path) -> str:
    path = folder / "2_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"in_features": HIDDEN}))
    return f"in_features = {HIDDEN}, but it gets vectors of {2 * HIDDEN} numbers"


def wrong_shape(folder: Path) -> str:
    return edited(folder, "linear.weight", torch.zeros(DENSE.outputs, 3))


def not_finite(folder: Path) -> str:
    return edited(folder, "linear.bias", torch.full((DENSE.outputs,), torch.nan))


def without_bias(folder: Path) -> str:
    return edited(folder, "linear.bias", None)


def without_file(folder: Path) -> str:
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    return "2_Dense has no model.safetensors"


def edited(folder: Path, name: str, value: torch.Tensor | None) -> str:
    path = folder / "2_Dense" / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name)
    if value is not None:
        tensors[name] = value
    save_file(tensors, path)
    return name


@pytest.mark.parametrize(
    "damage", [wrong_size, wrong_shape, not_finite, without_bias, without_file]
)
def test_load_dense_that_does_not_fit_raises_config_error(
    bert: Path, tmp_path: Path, damage: Any
) -> None:
    folder = sentence_folder(bert, tmp_path / "st", {"pooling_mode": ["cls", "mean"]}, DENSE)
    said = damage(folder)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert said in str(caught.value)
    assert "2_Dense" in str(caught.value)


def test_pooling_flag_overrides_the_files_and_keeps_their_modules(
    bert: Path, tmp_path: Path
) -> None:
    folder = sentence_folder(bert, tmp_path / "st", {"pooling_mode": "cls"}, Dense(HIDDEN, 4))
    mean = sentence_folder(bert, tmp_path / "mean", {"pooling_mode": "mean"}, Dense(HIDDEN, 4))
    found, due = vectors(folder, TEXTS, pooling="mean"), vectors(mean, TEXTS)
    assert all(map(torch.equal, found, due))
    assert not torch.equal(found[0], vectors(folder, TEXTS)[0])


@pytest.mark.parametrize("labels", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_embed_pairs_give_the_logits_of_the_models_own_head(tmp_path: Path, labels: int) -> None:
    """The second text has token type 1; in steps of one pair and of all."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(labels)
    config = transformers.BertConfig(
        vocab_size=211,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=80,
        max_position_embeddings=96,
        num_labels=labels,
        initializer_range=0.5,
    )
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    pairs = [([5, 7, 9, 3], 2), ([8, 1, 1, 6, 4, 2, 9], 5), ([4, 4], 0), ([9, 2, 3], 1)]
    for budget in (1, 1000):
        driver = Driver(tmp_path, max_num_encoder_tokens=budget)
        facts = driver.core.facts
        assert (facts.num_labels, facts.embedding_size) == (labels, 0)
        ids = [driver.embed(tokens, second=second) for tokens, second in pairs]
        driver.run()
        for number, (tokens, second) in zip(ids, pairs, strict=True):
            types = [int(0 < second <= place) for place in range(len(tokens))]
            with torch.inference_mode():
                due = model(torch.tensor([tokens]), token_type_ids=torch.tensor([types])).logits[0]
            torch.testing.assert_close(driver.vector(number), due, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="own head"):
        load(tmp_path, pooling="mean")


def test_embed_pair_of_a_model_with_one_token_type_has_no_types(tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path / "one", type_vocab_size=1)
    driver = Driver(folder)
    pair, single = driver.embed([5, 7, 9], second=1), driver.embed([5, 7, 9])
    driver.run()
    assert torch.equal(driver.vector(pair), driver.vector(single))
