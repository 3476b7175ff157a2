"""The files of sentence-transformers: settings that are read, and those refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.sentence import SentenceConfig, read_sentence
from engine.checkpoint.sentence_modules import MODES, NORMALIZE, DenseConfig
from engine.errors import ConfigError

OLD = "sentence_transformers.models"
NEW = "sentence_transformers.base.modules"
TRANSFORMER, POOLING = f"{OLD}.Transformer", f"{OLD}.Pooling"
DENSE, NORMALIZED = f"{OLD}.Dense", f"{OLD}.Normalize"
SWITCHES = (
    *("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens"),
    *("weightedmean_tokens", "lasttoken"),
)
PROMPTS = "config_sentence_transformers.json"
TEXTS = "sentence_bert_config.json"
STATES = {"method": "forward", "method_output_name": "last_hidden_state"}
TANH = "torch.nn.modules.activation.Tanh"
SMALLER = {"in_features": 8, "out_features": 4, "bias": True, "activation_function": TANH}


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def modules(*types: str) -> list[dict[str, Any]]:
    return [{"idx": i, "path": f"{i}_M" if i else "", "type": t} for i, t in enumerate(types)]


def switches(*on: str) -> dict[str, Any]:
    return {"word_embedding_dimension": 8} | {f"pooling_mode_{s}": s in on for s in SWITCHES}


def folder_of(folder: Path, *behind: str) -> Path:
    """Write a folder with mean pooling and the modules `behind` it."""
    write(folder, "modules.json", modules(TRANSFORMER, POOLING, *behind))
    write(folder, "1_M/config.json", switches("mean_tokens"))
    for number, kind in enumerate(behind, 2):
        if kind.endswith("Dense"):
            write(folder, f"{number}_M/config.json", SMALLER)
    return folder


@pytest.mark.parametrize(
    ("pooling", "modes"),
    [
        (switches("mean_tokens"), ("mean",)),
        (switches("lasttoken", "cls_token"), ("cls", "lasttoken")),
        (switches(*SWITCHES), MODES),
        (switches(), ("mean",)),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 8}, ("lasttoken",)),
        ({"pooling_mode": ["weightedmean", "max"]}, ("weightedmean", "max")),
        ({"pooling_mode": ["cls"], "pooling_mode_mean_tokens": True}, ("cls",)),
    ],
)
def test_read_sentence_pooling_config_gives_modes_in_the_order_of_the_library(
    tmp_path: Path, pooling: Any, modes: Any
) -> None:
    write(folder_of(tmp_path), "1_M/config.json", pooling)
    found = read_sentence(tmp_path)
    assert found.pooler.modes == tuple(modes)
    assert found.pooler.includes_prompt
    assert read_sentence(tmp_path, pooling="max").pooler.modes == ("max",)


@pytest.mark.parametrize("base", [OLD, f"{NEW}.x"])
def test_read_sentence_modules_keep_their_order(tmp_path: Path, base: str) -> None:
    """Only a Normalize that is the last module is left to the server."""
    kinds = [f"{base}.{kind}" for kind in ("Normalize", "Dense", "Dropout", "Normalize")]
    found = read_sentence(folder_of(tmp_path, *kinds))
    dense = DenseConfig(tmp_path / "3_M", 8, 4, True, "Tanh")
    assert found.pooler.modules == (NORMALIZE, dense)
    assert found.is_normalized
    last = read_sentence(folder_of(tmp_path / "last", NORMALIZED, DENSE))
    assert len(last.pooler.modules) == 2
    assert not last.is_normalized
    words = "mean pooling, normalised, Tanh of 8 to 4, normalised (modules.json)"
    assert str(found) == words


@pytest.mark.parametrize(
    ("given", "activation"),
    [
        ({}, "Tanh"),
        ({"activation_function": "torch.nn.modules.linear.Identity"}, "Identity"),
        ({"activation_function": "torch.nn.GELU", "use_residual": False}, "GELU"),
        ({"activation_function": "torch.nn.SiLU", "module_output_name": None}, "SiLU"),
    ],
)
def test_read_sentence_dense_names_its_activation(
    tmp_path: Path, given: dict[str, Any], activation: str
) -> None:
    folder_of(tmp_path, DENSE)
    write(tmp_path, "2_M/config.json", {"in_features": 8, "out_features": 4} | given)
    (dense,) = read_sentence(tmp_path).pooler.modules
    assert isinstance(dense, DenseConfig)
    assert (dense.activation, dense.has_bias) == (activation, True)


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [("BertModel", "mean"), ("Qwen3ForCausalLM", "lasttoken"), ("Qwen3Model", "mean")],
)
def test_read_sentence_without_modules_json_pools_by_the_architecture(
    tmp_path: Path, architecture: str, mode: str
) -> None:
    """Its other files are not read then, as in the library."""
    write(tmp_path, "config.json", {"architectures": [architecture]})
    write(tmp_path, TEXTS, {"max_seq_length": 7, "do_lower_case": True})
    write(tmp_path, PROMPTS, {"prompts": {"query": "q: "}, "default_prompt_name": "query"})
    found = read_sentence(tmp_path)
    assert (found.pooler.modes, found.is_normalized, found.longest) == ((mode,), False, None)
    assert (found.lowercase, found.standard_prompt) == (False, "")
    assert str(found) == f"{mode} pooling, not normalised (no modules.json)"
    assert read_sentence(tmp_path, pooling="last").pooler.modes == ("lasttoken",)


@pytest.mark.parametrize(
    ("texts", "tokenizer", "longest"),
    [
        ({"max_seq_length": 256}, {"model_max_length": 512}, 256),
        ({}, {"model_max_length": 512}, 512),
        ({"max_seq_length": None}, {"model_max_length": 1e30}, int(1e30)),
        ({}, {}, None),
    ],
)
def test_read_sentence_longest_text_is_the_modules_limit_else_the_tokenizers(
    tmp_path: Path, texts: Any, tokenizer: Any, longest: int | None
) -> None:
    folder_of(tmp_path)
    write(tmp_path, TEXTS, texts)
    write(tmp_path, "tokenizer_config.json", tokenizer)
    assert read_sentence(tmp_path).longest == longest
    assert read_sentence(tmp_path, longest=300).longest == 300, "an explicit limit wins"


def test_read_sentence_older_name_of_the_transformers_file_is_read(tmp_path: Path) -> None:
    folder_of(tmp_path)
    write(tmp_path, "sentence_roberta_config.json", {"max_seq_length": 9, "do_lower_case": True})
    found = read_sentence(tmp_path)
    assert (found.longest, found.lowercase) == (9, True)


def test_read_sentence_reads_the_transformers_file_of_version_6(tmp_path: Path) -> None:
    folder_of(tmp_path)
    written = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": STATES},
        "module_output_name": "token_embeddings",
    }
    write(tmp_path, TEXTS, written)
    assert read_sentence(tmp_path).longest is None


def prompts_of(folder: Path, **given: Any) -> SentenceConfig:
    write(folder_of(folder), PROMPTS, given)
    return read_sentence(folder)


def test_read_sentence_prompts_have_query_and_document_of_their_own(tmp_path: Path) -> None:
    found = prompts_of(tmp_path, prompts={"query": "q: ", "passage": "p: ", "none": None})
    assert found.prompts == {"query": "q: ", "document": "", "passage": "p: ", "none": ""}
    assert (found.standard_prompt, found.truncate_dim, found.similarity) == ("", None, "cosine")
    found = prompts_of(
        tmp_path,
        prompts={"x": "x "},
        default_prompt_name="x",
        truncate_dim=5,
        similarity_fn_name="dot",
    )
    assert (found.standard_prompt, found.truncate_dim, found.similarity) == ("x ", 5, "dot")
    assert prompts_of(tmp_path, similarity_fn_name="nonsense").similarity == "cosine"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("1_M/config.json", {"pooling_mode_new": True}, ["'pooling_mode_new'"]),
        ("1_M/config.json", {"pooling_mode": "median"}, ["pooling median", "weightedmean"]),
        ("1_M/config.json", {"pooling_mode": ["cls", "x"]}, ["cls and x"]),
        ("1_M/config.json", {"pooling_mode": []}, ["sets the pooling"]),
        ("1_M/config.json", {"include_prompt": "no"}, ["include_prompt = 'no'"]),
        ("1_M/config.json", "[]", ["1_M/config.json"]),
        ("modules.json", modules(TRANSFORMER, POOLING, f"{OLD}.CNN"), ["CNN", "Dense"]),
        ("modules.json", modules(TRANSFORMER, DENSE, POOLING), ["Transformer, Dense, Pooling"]),
        ("modules.json", modules("custom_st.Transformer", POOLING), ["custom_st"]),
        ("modules.json", modules(TRANSFORMER), ["lists Transformer;"]),
        (
            "modules.json",
            [{"type": TRANSFORMER, "path": "0_B"}, *modules("", POOLING)[1:]],
            ["0_B"],
        ),
        ("modules.json", [*modules(TRANSFORMER), {"type": POOLING, "path": "../x"}], ["'../x'"]),
        ("modules.json", [*modules(TRANSFORMER), {"type": POOLING, "path": "/x"}], ["'/x'"]),
        ("modules.json", {}, ["modules.json"]),
        ("modules.json", "[1]", ["modules.json"]),
        ("modules.json", "[", ["modules.json"]),
        (TEXTS, {"max_seq_length": "256"}, ["max_seq_length = '256'"]),
        (TEXTS, {"transformer_task": "fill-mask"}, ["'fill-mask'", "feature-extraction"]),
        (TEXTS, {"query_length": 32}, ["query_length = 32", "null"]),
        (TEXTS, {"processing_kwargs": {"text": {"max_length": 9}}}, ["processing_kwargs"]),
        (TEXTS, {"tokenizer_name_or_path": "x/y"}, ["tokenizer_name_or_path = 'x/y'"]),
        (TEXTS, {"modality_config": {"text": STATES, "message": STATES}}, ["no message"]),
        (TEXTS, {"modality_config": {"text": {"method": "get_text_features"}}}, ["text_features"]),
        (TEXTS, {"modality_config": ["text"]}, ["['text']"]),
        (PROMPTS, {"default_prompt_name": "x"}, ["default_prompt_name = 'x'", "document"]),
        (PROMPTS, {"prompts": ["x"]}, ["prompts = ['x']"]),
        (PROMPTS, {"prompts": {"x": 1}}, ["prompt 'x' = 1"]),
        (PROMPTS, {"truncate_dim": 0}, ["truncate_dim = 0"]),
        (PROMPTS, {"truncate_dim": -2}, ["truncate_dim = -2"]),
        ("2_M/config.json", SMALLER | {"activation_function": None}, ["= None", "torch.nn.Tanh"]),
        ("2_M/config.json", SMALLER | {"activation_function": "mine.Tanh"}, ["'mine.Tanh'"]),
        ("2_M/config.json", SMALLER | {"activation_function": "torch.tanh"}, ["'torch.tanh'"]),
        ("2_M/config.json", SMALLER | {"use_residual": True}, ["use_residual = True", "False"]),
        (
            "2_M/config.json",
            SMALLER | {"module_input_name": "token_embeddings"},
            ["'token_embeddings'", "'sentence_embedding'"],
        ),
        ("2_M/config.json", SMALLER | {"other": 1}, ["other = 1"]),
        ("2_M/config.json", SMALLER | {"in_features": "8"}, ["in_features", "'8'"]),
        ("2_M/config.json", SMALLER | {"bias": 1}, ["bias = 1"]),
        ("3_M/config.json", {"module_input_name": "token_embeddings"}, ["'token_embeddings'"]),
    ],
)
def test_read_sentence_unsupported_setting_raises_error_naming_it(
    tmp_path: Path, name: str, content: Any, said: list[str]
) -> None:
    read_sentence(folder_of(tmp_path, DENSE, NORMALIZED))
    write(tmp_path, name, content)
    with pytest.raises(ConfigError) as caught:
        read_sentence(tmp_path)
    for part in (name, *said):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["1_M/config.json", "2_M/config.json"])
def test_read_sentence_missing_config_of_a_module_raises_error_naming_it(
    tmp_path: Path, name: str
) -> None:
    (folder_of(tmp_path, DENSE) / name).unlink()
    with pytest.raises(ConfigError, match=name):
        read_sentence(tmp_path)
