"""The activation behind a head: the order of the files, and unsupported settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.sentence import SentenceConfig, read_sentence
from engine.errors import ConfigError

HEAD = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
OLDER = "sbert_ce_default_activation_function"
NN = "torch.nn.modules"


def read(
    folder: Path, config: dict[str, Any], settings: dict[str, Any] | None = None, **files: Any
) -> SentenceConfig:
    (folder / "config.json").write_text(json.dumps(HEAD | config))
    if settings is not None:
        kind = "sentence_transformers.base.modules.transformer.Transformer"
        files = {"modules": [{"type": kind, "path": ""}], **files}
        files["config_sentence_transformers"] = {"model_type": "CrossEncoder"} | settings
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_sentence(folder)


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("torch.nn.modules.activation.Sigmoid", "Sigmoid"),
        ("torch.nn.modules.linear.Identity", "Identity"),
        ("torch.nn.Identity", "Identity"),
        ("torch.nn.modules.activation.Softmax", "Softmax"),
    ],
)
def test_read_head_names_of_torch_are_known(tmp_path: Path, given: str, known: str) -> None:
    head = read(tmp_path, {OLDER: given}).head
    assert head is not None
    assert (head.of_scores, head.of_labels) == (known, known)


@pytest.mark.parametrize(
    ("config", "scores", "labels"),
    [
        ({}, "Sigmoid", "Sigmoid"),
        ({"problem_type": "regression"}, "Sigmoid", "Sigmoid"),
        ({"id2label": {"0": "a", "1": "b"}}, "Identity", "Softmax"),
        ({"id2label": None}, "Identity", "Softmax"),  # two labels
        (
            {"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"},
            "Identity",
            "Sigmoid",
        ),
    ],
)
def test_read_head_without_activation_depends_on_the_labels(
    tmp_path: Path, config: dict[str, Any], scores: str, labels: str
) -> None:
    head = read(tmp_path, config).head
    assert head is not None
    assert (head.of_scores, head.of_labels) == (scores, labels)


def test_read_head_labels_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = {str(n): f"name {n}" for n in range(11)}
    shuffled = dict(sorted(names.items()))  # "10" before "2"
    head = read(tmp_path, {"id2label": shuffled}).head
    assert head is not None
    assert head.labels == tuple(names.values())


def test_read_head_of_a_model_of_vectors_or_text_is_none(tmp_path: Path) -> None:
    for name in ("BertModel", "LlamaForCausalLM"):
        assert read(tmp_path, {"architectures": [name]}).head is None


@pytest.mark.parametrize(
    ("config", "settings", "word"),
    [
        ({OLDER: "my_code.Sigmoid"}, None, "my_code.Sigmoid"),
        ({OLDER: "torch.nn.modules.activation.Tanh"}, None, "Tanh"),
        ({OLDER: "torch.sigmoid"}, None, "torch.sigmoid"),
        ({OLDER: 7}, None, "= 7"),
        ({"sentence_transformers": {"activation_fn": "a.Identity"}}, None, "a.Identity"),
        ({}, {"activation_fn": "b.Identity"}, "config_sentence_transformers.json"),
        ({"id2label": {"0": "a", "2": "b"}}, None, "id2label"),
        ({"id2label": []}, None, "id2label"),
    ],
)
def test_read_head_unsupported_setting_raises_error_naming_it(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any] | None, word: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, config, settings)
    assert word in str(caught.value)
    assert ".json has" in str(caught.value)


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"sentence_bert_config": {"transformer_task": "text-generation"}}, "transformer_task"),
        ({"sentence_bert_config": {"module_output_name": "token_embeddings"}}, "module_output"),
        ({"sentence_bert_config": {"processing_kwargs": {"text": {"a": 1}}}}, "processing_kwargs"),
        (
            {
                "modules": [
                    {"type": "sentence_transformers.models.Transformer", "path": ""},
                    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
                ]
            },
            "Pooling",
        ),
    ],
)
def test_read_sentence_of_a_head_other_modules_raise_error_naming_them(
    tmp_path: Path, files: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        read(tmp_path, {}, {}, **files)


def test_read_sentence_of_a_head_settings_of_vectors_are_passed_over(tmp_path: Path) -> None:
    prompts = {"prompts": {"a": "b"}, "default_prompt_name": "a"}
    assert read(tmp_path, {}, prompts).standard_prompt == "b"
    assert read(tmp_path, {}, prompts | {"model_type": "SentenceTransformer"}).standard_prompt == ""
