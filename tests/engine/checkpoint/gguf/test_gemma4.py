"""Gemma 4 from GGUF files: settings of two kinds of layers, refusals, tokenizer and codes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from engine.checkpoint.gguf.config import config_of
from engine.checkpoint.gguf.settings import notes_on
from engine.checkpoint.gguf.tokenizer import build_tokenizer
from engine.errors import ConfigError
from tests.engine.checkpoint.gguf.test_models import gemma4_experts, logits_of
from tests.support import tiny_gemma4
from tests.support.gguf_files import write_gguf
from tests.support.golden import TOLERANCE, edit_checkpoint, of_transformers

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
PATTERN, HEADS = "attention__sliding_window_pattern", "attention__head_count_kv"
SLIDING = (
    *("attention__key_length_swa", "attention__value_length_swa"),
    "rope__dimension_count_swa",
)
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}


def settings(**changes: Any) -> dict[str, Any]:
    """Return the settings of a file; None removes one. Double underscores stand for dots."""
    own = tiny_gemma4.settings_of()
    own |= {key.replace("__", "."): value for key, value in changes.items()}
    named = {f"gemma4.{key}": value for key, value in own.items() if value is not None}
    return named | {"general.architecture": "gemma4"}


def config(factors: list[float] = tiny_gemma4.FACTORS, **changes: Any) -> dict[str, Any]:
    return config_of(settings(**changes), 288, tiny_gemma4.shapes_of(), factors)


def test_config_has_the_heads_of_both_kinds_of_layers() -> None:
    found = config()
    assert found["architectures"] == ["Gemma4ForCausalLM"]
    assert found["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert (found["head_dim"], found["num_key_value_heads"]) == (8, 2)
    heads = {"head_dim": 16, "num_key_value_heads": 1}
    assert found["per_layer_config"] == {"1": heads, "3": heads}
    assert found["attention_k_eq_v"] is True
    assert found["rope_parameters"]["full_attention"] == {
        "rope_type": "proportional",
        "rope_theta": 1e5,
        "partial_rotary_factor": 0.5,
        "factor": 1.0,
    }


def test_values_of_global_layers_make_them_values() -> None:
    tensors = tiny_gemma4.shapes_of() | tiny_gemma4.values()
    found = config_of(settings(), 288, tensors, tiny_gemma4.FACTORS)
    assert found["attention_k_eq_v"] is False
    del tensors["blk.3.attn_v.weight"]
    with pytest.raises(ConfigError, match=r"lacks the tensor blk\.3\.attn_v\.weight"):
        config_of(settings(), 288, tensors, tiny_gemma4.FACTORS)


def test_number_of_heads_may_be_one_for_all_layers() -> None:
    heads = config(**{HEADS: 2})["per_layer_config"]["1"]["num_key_value_heads"]
    assert heads == config(**{HEADS: [2] * 4})["num_key_value_heads"] == 2


def test_wide_networks_are_those_of_layers_that_share_kv() -> None:
    found = config(feed_forward_length=[64, 64, 128, 128], attention__shared_kv_layers=2)
    assert (found["intermediate_size"], found["use_double_wide_mlp"]) == (64, True)
    assert found["num_kv_shared_layers"] == 2


def test_absent_cap_is_that_of_llama_cpp_and_is_noted() -> None:
    assert config(final_logit_softcapping=None)["final_logit_softcapping"] == 30.0
    assert config(final_logit_softcapping=0.0)["final_logit_softcapping"] is None
    [note] = notes_on(settings(final_logit_softcapping=None))
    assert "no gemma4.final_logit_softcapping" in note
    assert not notes_on(settings())


def test_other_factors_divide_each_frequency() -> None:
    factors = [1.0, 1.5, *[2.0] * 6]
    found = config(factors)["rope_parameters"]["full_attention"]
    assert (found["rope_type"], found["long_factor"]) == ("longrope", factors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({PATTERN: None}, "lacks gemma4.attention.sliding_window_pattern"),
        ({PATTERN: 2}, "sliding_window_pattern = 2; it must be a list"),
        ({PATTERN: [True, False]}, "an entry for each of 4 layers"),
        ({PATTERN: [True] * 4}, "the last one must be False"),
        ({"attention__sliding_window": 0}, "gemma4.attention.sliding_window = 0; it must be"),
        ({"attention__shared_kv_layers": 4}, "attention.shared_kv_layers = 4; it must be below 4"),
        ({"attention__shared_kv_layers": -1}, "attention.shared_kv_layers = -1; it must be"),
        ({"embedding_length_per_layer_input": "x"}, "embedding_length_per_layer_input = 'x'"),
        ({HEADS: [2, 1, 1, 1]}, "a number for all sliding and one for all other layers"),
        ({HEADS: [2, 1]}, "gemma4.attention.head_count_kv has 2 entries, for 4 layers"),
        ({HEADS: [2, 3, 2, 3]}, "2 heads, which is no multiple of 3"),
        ({HEADS: [2, 0, 2, 0]}, "gemma4.attention.head_count_kv = 0; it must be"),
        ({HEADS: []}, "gemma4.attention.head_count_kv has 0 entries"),
        ({"feed_forward_length": [64, 96, 64, 96]}, "or twice that for the last ones"),
        ({"feed_forward_length": [64, 64, 64, 128]}, "or twice that for the last ones"),
        ({"attention__key_length_swa": None}, "lacks gemma4.attention.key_length_swa"),
        (dict.fromkeys(SLIDING, 7), "heads of 7 dimensions; the number must be even"),
        ({"attention__value_length_swa": 16}, "gemma4.attention.value_length_swa to 16"),
        ({"rope__dimension_count_swa": 4}, "gemma4.rope.dimension_count_swa to 4"),
        ({"rope__dimension_count": 8}, "gemma4.rope.dimension_count to 8"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "rope_freqs.weight"),
        (EXPERTS | {"expert_used_count": None}, "lacks gemma4.expert_used_count"),
        (EXPERTS | {"expert_feed_forward_length": 0}, "expert_feed_forward_length = 0; it must be"),
        ({"block_count": "four"}, "gemma4.block_count = 'four'; it must be a whole number"),
    ],
    ids=str,
)
def test_malformed_setting_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(**changes)


SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
CONTROL, BYTE, USER_DEFINED, NORMAL = 3, 6, 4, 1
LETTERS = [*"abdeghint\n\t▁é", "th", "the", "▁the", "an", "and", "in", "ing", "\n\n", "▁▁"]
MERGES = ["t h", "th e", "▁ the", "a n", "an d", "i n", "in g", "\n \n", "▁ ▁"]
TOKENS = [*SPECIAL, "<|channel>", *[f"<0x{byte:02X}>" for byte in range(256)], *LETTERS]
KINDS = [CONTROL] * 4 + [NORMAL, USER_DEFINED] + [BYTE] * 256 + [NORMAL] * len(LETTERS)
TOKENIZER = {
    "tokenizer.ggml.model": "gemma4",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": KINDS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.add_space_prefix": False,
}


def published_tokenizer() -> Tokenizer:
    """Return a tokenizer in the form of Gemma 4's tokenizer.json."""
    pairs = [(first, second) for first, second in (merge.split(" ") for merge in MERGES)]
    ids = {token: number for number, token in enumerate(TOKENS)}
    found = Tokenizer(models.BPE(ids, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    found.normalizer = normalizers.Replace(" ", "▁")
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    found.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    found.add_tokens([AddedToken("<|channel>", normalized=False, special=False)])
    found.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tokenizer.ggml.add_bos_token": True},
        {"tokenizer.ggml.add_bos_token": False},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gemma4"},
    ],
    ids=str,
)
def test_tokenizer_equals_the_published_one(more: dict[str, Any]) -> None:
    """As in llama.cpp, a text begins with BOS even if the file says that it does not."""
    found, due = build_tokenizer(TOKENIZER | more), published_tokenizer()
    for text in (
        "the thing and the end",
        " two  spaces   at\n\n\nlines\t\n the",
        "é ü 漢 \U0001f600",
        "<|channel>thought\nanding<turn|><eos>",
        "",
    ):
        ids = found.encode(text).ids
        assert ids == due.encode(text).ids, text
        assert ids[0] == 2
        assert found.decode(ids) == due.decode(ids)


@pytest.mark.slow
def test_codes_of_experts_equal_the_rounded_checkpoint(tmp_path: Path) -> None:
    """A tensor of the file has the gates and ups of all experts."""
    of_transformers(gemma4_experts(), tmp_path / "checkpoint")
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "checkpoint", "gemma4", "Q8_0")
    number = gguf.GGMLQuantizationType.Q8_0

    def rounded(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim > 1:
                packed = gguf.quants.quantize(tensor.numpy(), number)
                tensors[name] = torch.from_numpy(gguf.quants.dequantize(packed, number))

    edit_checkpoint(tmp_path / "checkpoint", rounded)
    prompt = [(3 * index + 1) % 288 for index in range(50)]
    found = logits_of(file, prompt)
    torch.testing.assert_close(found, logits_of(tmp_path / "checkpoint", prompt), **TOLERANCE)
