"""Qwen3-Next and Qwen3.5 from GGUF files: settings, refusals, and the order of heads in codes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from engine.checkpoint.gguf.config import config_of
from engine.checkpoint.gguf.delta import without_drafter
from engine.checkpoint.gguf.header import StoredTensor
from engine.checkpoint.gguf.kinds import KINDS
from engine.checkpoint.gguf.settings import own_settings
from engine.checkpoint.gguf.shapes import checked_tensors, shapes_of
from engine.errors import ConfigError
from tests.engine.checkpoint.gguf.test_models import logits_of, qwen3_5
from tests.support.gguf_files import write_gguf
from tests.support.golden import TOLERANCE, edit_checkpoint, of_transformers

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
OWN = {
    "block_count": 5,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 4,
    "rope.dimension_sections": [11, 11, 10, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 32,
}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}


def settings(architecture: str = "qwen35", **changes: Any) -> dict[str, Any]:
    """Return the settings of a file; None removes one. Underscores in pairs stand for dots."""
    own = OWN | {key.replace("__", "."): value for key, value in changes.items()}
    named = {f"{architecture}.{key}": value for key, value in own.items() if value is not None}
    return named | {"general.architecture": architecture}


def kinds(given: dict[str, Any]) -> str:
    """Return the first letters of the kinds of layers."""
    return "".join(kind[0] for kind in config_of(given, 288)["layer_types"])


def test_list_of_recurrent_layers_takes_precedence_over_the_interval() -> None:
    assert kinds(settings()) == "lllfl"
    assert kinds(settings(full_attention_interval=2)) == "lflfl"
    listed = {"attention__recurrent_layers": [True, False, False, True, True]}
    assert kinds(settings(full_attention_interval=2, **listed)) == "lffll"


def test_config_has_the_sizes_of_the_heads() -> None:
    config = config_of(settings(), 288)
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["partial_rotary_factor"] == 0.25
    found = {key: value for key, value in config.items() if key.startswith("linear_")}
    assert found == {
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
    }


@pytest.mark.parametrize("architecture", ["qwen3next", "qwen35moe"])
def test_size_of_plain_networks_may_be_left_out_if_all_layers_have_experts(
    architecture: str,
) -> None:
    given = settings(architecture, feed_forward_length=None, **EXPERTS)
    config = config_of(given, 288)
    assert config["moe_intermediate_size"] == 24
    assert config["architectures"] == ["Qwen3_5MoeForCausalLM"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__recurrent_layers": [True]}, "an entry for each of 5 layers"),
        ({"attention__recurrent_layers": 3}, "attention.recurrent_layers = 3; it must be a list"),
        ({"full_attention_interval": 0}, "full_attention_interval = 0; it must be a whole number"),
        ({"ssm__inner_size": 33}, "ssm.inner_size 33 and ssm.time_step_rank 4"),
        ({"ssm__time_step_rank": 3, "ssm__inner_size": 24}, "ssm.time_step_rank 3 for"),
        ({"ssm__state_size": None}, "lacks qwen35.ssm.state_size"),
        ({"ssm__conv_kernel": 0}, "qwen35.ssm.conv_kernel = 0; it must be"),
        ({"feed_forward_length": None}, "lacks qwen35.feed_forward_length"),
        ({"rope__dimension_count": 5}, "qwen35.rope.dimension_count = 5; it must be an even"),
        ({"nextn_predict_layers": 5}, "qwen35.nextn_predict_layers = 5; it must be a whole"),
    ],
    ids=str,
)
def test_malformed_setting_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_of(settings(**changes), 288)


def test_layers_need_the_tensors_of_their_kind() -> None:
    required = shapes_of(settings(), 288).required
    attends, recurs = "blk.3.attn_q.weight", "blk.0.ssm_a"
    assert required[attends] == (2 * 4 * 16, 64)
    assert required[recurs] == (4,)
    assert required["blk.0.ssm_dt.bias"] == (4,)
    assert attends.replace("3", "0") not in required
    assert recurs.replace("0", "3") not in required


def test_codes_are_in_the_order_of_the_checkpoint(tmp_path: Path) -> None:
    """The converter reorders value heads before it rounds, by whole groups of 32 inputs."""
    config = qwen3_5(linear_value_head_dim=32)
    of_transformers(config, tmp_path / "checkpoint")
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "checkpoint", "qwen35", "Q8_0")
    number = gguf.GGMLQuantizationType.Q8_0

    def rounded(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                packed = gguf.quants.quantize(tensor.numpy(), number)
                tensors[name] = torch.from_numpy(gguf.quants.dequantize(packed, number))

    edit_checkpoint(tmp_path / "checkpoint", rounded)
    prompt = [(3 * index + 1) % 288 for index in range(50)]
    found = logits_of(file, prompt)
    torch.testing.assert_close(found, logits_of(tmp_path / "checkpoint", prompt), **TOLERANCE)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 64)])
def test_vector_may_be_a_matrix_of_one_row(shape: tuple[int, ...]) -> None:
    """The converter writes the gate of the shared expert so."""
    given, name = settings("qwen35moe", **EXPERTS), "blk.0.ffn_gate_inp_shexp.weight"
    shapes = shapes_of(given, 288).required
    stored = {
        tensor: StoredTensor(Path("a.gguf"), KINDS[0], each, 0, 0)
        for tensor, each in (shapes | {name: shape}).items()
    }
    if len(shape) == 2 and shape[0] > 1:
        with pytest.raises(ConfigError, match="has the shape"):
            checked_tensors(given, 288, stored)
    else:
        checked_tensors(given, 288, stored)


def test_layers_that_draft_tokens_are_left_out() -> None:
    """The converter counts them among the others, and says of each that it attends."""
    recurs = [True, True, True, False, False]
    given = settings(nextn_predict_layers=1, attention__recurrent_layers=recurs)
    assert kinds(given) == "lllf"
    shapes = shapes_of(given, 288).required
    assert not any(name.startswith("blk.4.") for name in shapes)
    tensors = shapes | {"blk.4.nextn.eh_proj.weight": (64, 128), "blk.4.attn_norm.weight": (64,)}
    assert without_drafter(tensors, own_settings(given)) == shapes


def test_projection_in_an_old_form_is_refused() -> None:
    given = settings("qwen3next", **EXPERTS)
    shapes = shapes_of(given, 288).required
    shapes["blk.0.ssm_in.weight"] = shapes.pop("blk.0.attn_qkv.weight")
    stored = {
        tensor: StoredTensor(Path("a.gguf"), KINDS[0], each, 0, 0)
        for tensor, each in shapes.items()
    }
    with pytest.raises(ConfigError, match=r"lacks the tensor blk\.0\.attn_qkv"):
        checked_tensors(given, 288, stored)
