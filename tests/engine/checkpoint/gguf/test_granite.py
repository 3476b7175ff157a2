"""Granite from GGUF files against `transformers`, its settings, and codes of joined tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.gguf.config import config_of
from engine.checkpoint.gguf.granite import SCALES
from engine.checkpoint.gguf.shapes import shapes_of
from engine.checkpoint.gguf.tensors import StackedTensor, read_tensors
from engine.errors import ConfigError
from tests.engine.checkpoint.gguf.test_models import HEADS, SIZES, logits_of
from tests.support.gguf_files import write_gguf
from tests.support.golden import TOLERANCE, of_transformers

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
ATTENTION, RECURRENT = "full_attention", "linear_attention"
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32}
OWN = {
    "block_count": 4,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": [0, 2, 0, 2],
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.scale": 0.25,
    "embedding_scale": 12.0,
    "residual_scale": 0.5,
    "logit_scale": 8.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_shared_feed_forward_length": 96,
    "rope.scaling.finetuned": False,
    "rope.dimension_count": 16,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 128,
}


def settings(**changes: Any) -> dict[str, Any]:
    """Return the settings of a file; None removes one. Underscores in pairs stand for dots."""
    own = OWN | {key.replace("__", "."): value for key, value in changes.items()}
    named = {f"granitehybrid.{key}": value for key, value in own.items() if value is not None}
    return named | {"general.architecture": "granitehybrid"}


def granite(**more: Any) -> Any:
    from transformers import GraniteMoeHybridConfig

    small = {
        "layer_types": [RECURRENT, ATTENTION],
        "num_hidden_layers": 2,
        "shared_intermediate_size": 96,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "position_embedding_type": "nope",
        **dict.fromkeys(SCALES, 0.6),
    }
    return GraniteMoeHybridConfig(**(SIZES | HEADS | small | more))


ROTATED = {"position_embedding_type": "rope", "attention_bias": True, "mamba_conv_bias": False}


def check(config: Any, architecture: str, folder: Path) -> None:
    """Compare logits from a GGUF file with those of transformers."""

    def last_long(model: Any) -> None:
        """Let states last for many tokens."""
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.data -= 3.5

    reference = of_transformers(config, folder / "checkpoint", prepare=last_long)
    file = write_gguf(folder / "model.gguf", folder / "checkpoint", architecture)
    prompt = [(7 * index + 3) % 250 for index in range(40)]
    with torch.inference_mode():
        due = reference(input_ids=torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits_of(file, prompt), due, **TOLERANCE)


@pytest.mark.parametrize("more", [{}, EXPERTS, ROTATED], ids=["dense", "experts", "positions"])
def test_logits_of_granite_4_equal_those_of_the_checkpoint(
    more: dict[str, Any], tmp_path: Path
) -> None:
    check(granite(**more), "granitehybrid", tmp_path)


@pytest.mark.parametrize("has_experts", [False, True])
def test_logits_of_granite_3_equal_those_of_the_checkpoint(
    has_experts: bool, tmp_path: Path
) -> None:
    from transformers import GraniteConfig, GraniteMoeConfig

    given = SIZES | HEADS | {"num_hidden_layers": 2} | dict.fromkeys(SCALES, 0.6)
    if has_experts:
        check(GraniteMoeConfig(**(given | EXPERTS)), "granitemoe", tmp_path)
    else:
        biases = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
        check(GraniteConfig(**(given | biases)), "granite", tmp_path)


def test_granite_4_without_recurrent_layers_is_a_file_of_granite() -> None:
    """The converter then keeps the sizes of Mamba-2, and counts no experts."""
    own = OWN | {"attention.head_count_kv": [2] * 4, "rope.scaling.finetuned": True}
    named = {f"granite.{key}": value for key, value in own.items()}
    config = config_of(named | {"general.architecture": "granite"}, 288)
    assert config["architectures"] == ["GraniteForCausalLM"]
    assert config["intermediate_size"] == 96
    assert config["logits_scaling"] == 8.0


def test_granite_without_positions_is_refused() -> None:
    named = {f"granite.{key}": value for key, value in OWN.items()}
    given = named | {"general.architecture": "granite", "granite.attention.head_count_kv": 2}
    with pytest.raises(ConfigError, match=r"granite\.rope\.scaling\.finetuned = False"):
        config_of(given, 288)


def test_codes_of_joined_experts_stand_for_their_numbers(tmp_path: Path) -> None:
    """A checkpoint's tensor has each expert's gate before its up; the file has two tensors."""
    of_transformers(granite(**EXPERTS), tmp_path / "checkpoint")
    others = {"ffn_up_exps": "Q4_0", "ffn_down_shexp": "F16"}
    names = {
        "block_sparse_moe.input_linear": (5, 64, 64),
        "block_sparse_moe.output_linear": (5, 64, 32),
        "shared_mlp.input_linear": (192, 64),
    }
    file = write_gguf(
        tmp_path / "model.gguf", tmp_path / "checkpoint", "granitehybrid", "Q8_0", others=others
    )
    tensors = read_tensors([file])
    for name, shape in names.items():
        tensor = tensors[f"model.layers.0.{name}.weight"]
        assert isinstance(tensor, StackedTensor)
        numbers = tensor.read()
        assert numbers.shape == shape
        codes = tensor.codes()
        assert tensor.form is not None
        assert codes.form[:2] == tensor.form[:2]
        torch.testing.assert_close(codes.dequantize(), numbers.view(-1, shape[-1]))


def test_joined_tensor_without_codes_in_a_part_has_no_form(tmp_path: Path) -> None:
    of_transformers(granite(), tmp_path / "checkpoint")
    file = write_gguf(
        tmp_path / "model.gguf",
        tmp_path / "checkpoint",
        "granitehybrid",
        "Q8_0",
        others={"ffn_up": "F16"},
    )
    tensor = read_tensors([file])["model.layers.1.shared_mlp.input_linear.weight"]
    assert tensor.form is None
    assert tensor.read().shape == (192, 64)


def test_layer_without_key_value_heads_is_recurrent() -> None:
    config = config_of(settings(), 288)
    assert config["layer_types"] == [RECURRENT, ATTENTION] * 2
    assert config["num_key_value_heads"] == 2
    required = shapes_of(settings(), 288).required
    assert required["blk.0.ssm_in.weight"] == (128 + 192 + 8, 64)
    assert "blk.0.attn_q.weight" not in required
    assert "blk.1.ssm_in.weight" not in required


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({}, "nope"), ({"rope__scaling__finetuned": True}, "rope")],
)
def test_positions_are_used_if_the_file_says_so(changes: dict[str, Any], kind: str) -> None:
    assert config_of(settings(**changes), 288)["position_embedding_type"] == kind


def test_positions_are_used_without_the_setting() -> None:
    found = config_of(settings(rope__scaling__finetuned=None), 288)
    assert found["position_embedding_type"] == "rope"


def test_scale_of_zero_or_without_a_setting_is_none() -> None:
    changes = {"attention__scale": None, "embedding_scale": 0, "logit_scale": None}
    config = config_of(settings(**changes, residual_scale=0.0), 288)
    assert {key: config[key] for key in SCALES} == {
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }


def test_sizes_of_experts_are_those_of_the_file() -> None:
    config = config_of(settings(expert_count=6, expert_used_count=2, feed_forward_length=40), 288)
    assert config["num_local_experts"] == 6
    assert config["num_experts_per_tok"] == 2
    assert config["intermediate_size"] == 40
    assert config["shared_intermediate_size"] == 96


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm__state_size": None}, "lacks granitehybrid.ssm.state_size"),
        ({"ssm__inner_size": 120}, "granitehybrid.ssm.inner_size 120, which must be a multiple"),
        ({"ssm__time_step_rank": 7}, "ssm.time_step_rank 7"),
        ({"ssm__group_count": 0}, "granitehybrid.ssm.group_count = 0; it must be"),
        ({"attention__head_count_kv": [0] * 4}, "no key/value heads in any layer"),
        ({"embedding_scale": -1.0}, "granitehybrid.embedding_scale = -1.0; it must be"),
        ({"expert_count": 4, "expert_used_count": None}, "lacks granitehybrid.expert_used_count"),
        (
            {"expert_count": 4, "expert_shared_feed_forward_length": None},
            "lacks granitehybrid.expert_shared_feed_forward_length",
        ),
        ({"expert_count": "4"}, "granitehybrid.expert_count = '4'; it must be a whole number"),
        ({"rope__scaling__finetuned": 1}, "finetuned = 1; it must be true or false"),
        ({"rope__dimension_count": 8}, "granitehybrid.rope.dimension_count to 8"),
        ({"expert_group_count": 2}, "granitehybrid.expert_group_count to 2"),
    ],
    ids=str,
)
def test_malformed_setting_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_of(settings(**changes), 288)
