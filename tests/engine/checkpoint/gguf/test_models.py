"""Models from GGUF files against `transformers`: names, order of rows, norms and settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.folder import model_folder
from engine.checkpoint.gguf import tensors as gguf_tensors
from engine.checkpoint.gguf.header import Header
from engine.config import EngineConfig
from engine.runner.load import load_engine
from tests.support.forward import forward, whole
from tests.support.gguf_files import DELTAS, write_gguf
from tests.support.golden import TOLERANCE, load, of_transformers
from tests.support.single_steps import in_single_steps

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
SIZES = {"vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
GEMMA = SIZES | HEADS | {"head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GLOBAL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
TEMPERED = YARN | {
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**(SIZES | HEADS | more))


def biased_llama() -> Any:
    return llama(attention_bias=True, mlp_bias=True)


def qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**SIZES, **HEADS)


def qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**SIZES, **HEADS, head_dim=32)


def gemma() -> Any:
    from transformers import GemmaConfig

    return GemmaConfig(**SIZES, **HEADS, head_dim=32)


def gemma2() -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(**GEMMA)


def gemma3() -> Any:
    from transformers import Gemma3TextConfig

    rope = {"full_attention": GLOBAL, "sliding_attention": LOCAL}
    return Gemma3TextConfig(**(GEMMA | {"num_hidden_layers": 7, "rope_parameters": rope}))


GEMMA4 = (
    SIZES
    | HEADS
    | {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": LOCAL,
        },
        "hidden_size_per_layer_input": 0,
    }
)


def gemma4(**more: Any) -> Any:
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(**(GEMMA4 | more))


def small_gemma4() -> Any:
    """Return a config like that of E2B: the third layer reads the KV of the first one."""
    return gemma4(
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=288,
        final_logit_softcapping=8.0,
    )


def gemma4_experts() -> Any:
    sizes = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    keys = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return gemma4(enable_moe_block=True, **sizes, **keys)


def ministral3() -> Any:
    from transformers import Ministral3Config

    return Ministral3Config(**SIZES, **HEADS, rope_parameters=dict(TEMPERED), head_dim=32)


def olmo2() -> Any:
    from transformers import Olmo2Config

    return Olmo2Config(**SIZES, **HEADS)


def olmo3() -> Any:
    from transformers import Olmo3Config

    rope = {"full_attention": YARN, "sliding_attention": LOCAL}
    sizes = SIZES | {"num_hidden_layers": 4}
    return Olmo3Config(**sizes, **HEADS, sliding_window=20, rope_parameters=rope)


def cohere() -> Any:
    from transformers import CohereConfig

    return CohereConfig(**SIZES, **HEADS, logit_scale=0.5)


def cohere2() -> Any:
    from transformers import Cohere2Config

    sizes = SIZES | {"num_hidden_layers": 4}
    return Cohere2Config(**sizes, **HEADS, sliding_window=20, logit_scale=0.5)


def qwen2_moe() -> Any:
    from transformers import Qwen2MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen2MoeConfig(**SIZES, **HEADS, **experts, shared_expert_intermediate_size=64)


def gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(vocab_size=288, n_positions=256, n_embd=64, n_layer=3, n_head=4, n_inner=96)


def glm4(**more: Any) -> Any:
    from transformers import Glm4Config

    return Glm4Config(**SIZES, **HEADS, head_dim=32, **more)


def exaone4(**more: Any) -> Any:
    from transformers import Exaone4Config

    return Exaone4Config(**(SIZES | HEADS | more))


def large_exaone4() -> Any:
    """Return the layers of the 32B model: llama.cpp reads a window for them only."""
    small = {"num_hidden_layers": 64, "hidden_size": 32, "intermediate_size": 32}
    rope = {"rope_parameters": LLAMA3, "sliding_window_pattern": 4}
    return exaone4(**small, sliding_window=20, **rope)


def starcoder2(**more: Any) -> Any:
    from transformers import Starcoder2Config

    return Starcoder2Config(**SIZES, **HEADS, **more)


def stablelm(**more: Any) -> Any:
    from transformers import StableLmConfig

    return StableLmConfig(**SIZES, **HEADS, **more)


def lfm2(**more: Any) -> Any:
    from transformers import Lfm2Config

    kinds = ["conv", "full_attention", "conv"]
    return Lfm2Config(**SIZES, **HEADS, layer_types=kinds, block_auto_adjust_ff_dim=False, **more)


def lfm2_moe() -> Any:
    from transformers import Lfm2MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    kinds = ["conv", "full_attention", "conv"]
    return Lfm2MoeConfig(**SIZES, **HEADS, **experts, layer_types=kinds, num_dense_layers=1)


DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "rms_norm_eps": 1e-2,  # the gated norm would magnify the rounding of small reads
    "head_dim": 16,
}
DELTA_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}


def qwen3_next() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(**SIZES, **HEADS, **DELTA, **DELTA_EXPERTS)


def qwen3_5(**more: Any) -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**SIZES, **HEADS, **(DELTA | more))


def qwen3_5_moe() -> Any:
    from transformers import Qwen3_5MoeTextConfig

    sizes = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    return Qwen3_5MoeTextConfig(**sizes, **HEADS, **DELTA, **DELTA_EXPERTS)


NO_WINDOW = {"sliding_window": None, "layer_types": ["full_attention"] * 3}
LARGE_STABLELM = {"use_parallel_residual": True, "qk_layernorm": True}
CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("llama", llama),
    "llama 3.1": ("llama", lambda: llama(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama with biases": ("llama", biased_llama),
    "qwen2": ("qwen2", qwen2),
    "qwen3": ("qwen3", qwen3),
    "gemma": ("gemma", gemma),
    "gemma2": ("gemma2", gemma2),
    "gemma3": ("gemma3", gemma3),
    "gemma4": ("gemma4", gemma4),
    "gemma4 E2B": ("gemma4", small_gemma4),
    "gemma4 with experts": ("gemma4", gemma4_experts),
    "ministral3": ("mistral3", ministral3),
    "olmo2": ("olmo2", olmo2),
    "olmo3": ("olmo2", olmo3),
    "cohere": ("command-r", cohere),
    "cohere2": ("cohere2", cohere2),
    "qwen2_moe": ("qwen2moe", qwen2_moe),
    "qwen3_next": ("qwen3next", qwen3_next),
    "qwen3_5": ("qwen35", qwen3_5),
    "qwen3_5 with equal heads": ("qwen35", lambda: qwen3_5(linear_num_value_heads=2)),
    "qwen3_5_moe": ("qwen35moe", qwen3_5_moe),
    "glm4": ("glm4", glm4),
    "glm4 32B": ("glm4", lambda: glm4(attention_bias=False, tie_word_embeddings=True)),
    "exaone4 1.2B": ("exaone4", lambda: exaone4(**NO_WINDOW, rope_parameters=LLAMA3)),
    "exaone4 32B": ("exaone4", large_exaone4),
    "starcoder2": ("starcoder2", starcoder2),
    "starcoder2 15B": ("starcoder2", lambda: starcoder2(tie_word_embeddings=False)),
    "stablelm": ("stablelm", lambda: stablelm(use_qkv_bias=True)),
    "stablelm 12B": ("stablelm", lambda: stablelm(**LARGE_STABLELM)),
    "lfm2": ("lfm2", lfm2),
    "lfm2 untied": ("lfm2", lambda: lfm2(tie_word_embeddings=False)),
    "lfm2_moe": ("lfm2moe", lfm2_moe),
    "gpt2": ("gpt2", gpt2),
}


def logits_of(model: Path, prompt: list[int]) -> torch.Tensor:
    return forward(load(model), [prompt], whole([prompt]))[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.variants(5)
def test_logits_equal_those_of_the_checkpoint(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    reference = of_transformers(config(), tmp_path / "checkpoint")
    prompt = torch.randint(288, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "checkpoint", architecture)
    found = logits_of(file, prompt)
    if architecture in DELTAS:
        reference = in_single_steps(reference)
    with torch.inference_mode():
        due = reference(input_ids=torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(found, due, **TOLERANCE)


@pytest.mark.variants(3)
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_logits_equal_those_of_the_rounded_checkpoint(kind: str, tmp_path: Path) -> None:
    """The reference computes with the numbers that the definition of the encoding gives."""
    reference = of_transformers(llama(), tmp_path / "checkpoint")
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "checkpoint", "llama", kind)
    number = gguf.GGMLQuantizationType[kind]
    with torch.inference_mode():
        for parameter in reference.parameters():
            if parameter.ndim > 1:
                packed = gguf.quants.quantize(parameter.numpy(), number)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, number)))
        prompt = torch.randint(288, (100,), generator=torch.Generator().manual_seed(1)).tolist()
        due = reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits_of(file, prompt), due, **TOLERANCE)


def test_header_of_a_gguf_file_is_read_once_by_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has the whole vocabulary. The plan reads it if codes are kept, else loading does."""
    read: list[Path] = []
    read_header = gguf_tensors.read_header

    def counted(file: Path) -> Header:
        read.append(file)
        return read_header(file)

    of_transformers(llama(), tmp_path / "checkpoint")
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "checkpoint", "llama", "Q8_0")
    config = EngineConfig(model=str(file), max_model_len=64, num_gpu_blocks_override=8, threads=1)
    monkeypatch.setattr(gguf_tensors, "read_header", counted)
    load_engine(config)
    assert len(read) == 1


def test_quantized_experts_equal_those_of_the_rounded_checkpoint(tmp_path: Path) -> None:
    """A tensor of the file has all experts of a layer."""
    reference = of_transformers(qwen2_moe(), tmp_path / "checkpoint")
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "checkpoint", "qwen2moe", "Q8_0")
    number = gguf.GGMLQuantizationType.Q8_0
    prompt = list(range(3, 63))
    with torch.inference_mode():
        for name, parameter in reference.named_parameters():
            if parameter.ndim > 1 and "shared_expert_gate" not in name:
                packed = gguf.quants.quantize(parameter.numpy(), number)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, number)))
        due = reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits_of(file, prompt), due, **TOLERANCE)


def test_parts_of_a_split_file_are_read_together(tmp_path: Path) -> None:
    of_transformers(llama(), tmp_path / "checkpoint")
    whole_file = write_gguf(tmp_path / "model.gguf", tmp_path / "checkpoint", "llama")
    tensors = gguf.GGUFReader(whole_file).tensors
    prompt = list(range(40))
    due = logits_of(whole_file, prompt)
    second = gguf.GGUFWriter(tmp_path / "m-00002-of-00002.gguf", "llama")
    for tensor in tensors:
        second.add_tensor(tensor.name, tensor.data)
    for step in ("header", "kv_data", "tensors"):
        getattr(second, f"write_{step}_to_file")()
    second.close()
    first = write_gguf(
        tmp_path / "m-00001-of-00002.gguf", tmp_path / "checkpoint", "llama", weights=False
    )
    assert torch.equal(logits_of(first, prompt), due)
    folder = tmp_path / "alone"
    folder.mkdir()
    first.rename(folder / first.name)
    (tmp_path / "m-00002-of-00002.gguf").rename(folder / "m-00002-of-00002.gguf")
    assert torch.equal(logits_of(folder, prompt), due)


def test_changed_file_has_another_folder(tmp_path: Path) -> None:
    of_transformers(llama(), tmp_path / "checkpoint")
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "checkpoint", "llama")
    before = model_folder(str(file))
    assert model_folder(str(file)) == before
    config = read_json(tmp_path / "checkpoint" / "config.json") | {"rms_norm_eps": 1e-3}
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    write_gguf(file, tmp_path / "checkpoint", "llama")
    after = model_folder(str(file))
    assert after != before
    assert read_json(after / "config.json")["rms_norm_eps"] == pytest.approx(1e-3)
