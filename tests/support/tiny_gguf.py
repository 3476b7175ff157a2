"""Tiny GGUF files with random weights, of every architecture that is served from GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support import tiny_gemma4, tiny_granite, tiny_latent, tiny_llamas

ARCHITECTURES = (
    *("llama", "mistral3", "qwen2", "qwen2moe", "qwen3", "gemma", "gemma2", "gemma3"),
    *("olmo2", "command-r", "cohere2", "gpt2", "glm4", "exaone4", "starcoder2", "stablelm"),
    *("lfm2", "lfm2moe", "gemma4", "granitehybrid", "deepseek2"),
    *tiny_llamas.NAMES,
)
OTHERS = {
    "gemma4": tiny_gemma4,
    "granitehybrid": tiny_granite,
    "deepseek2": tiny_latent,
    **tiny_llamas.modules(),
}
HIDDEN, INNER, HEADS, WIDTH = 32, 64, 2, 16  # and one head of keys and values
LAYERS = {"gemma2": 4, "gemma4": 4, "gemma3": 7, "olmo2": 4, "cohere2": 4, "lfm2": 3, "lfm2moe": 3}
HYBRIDS = ("lfm2", "lfm2moe")  # their second layer attends
TAPS = 3  # of their convolutions
EXPERTS, EXPERT_INNER, SHARED_INNER = 4, 32, 48
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
LETTERS = "abcdefghijklm"
WORDS = [first + second for first in LETTERS for second in LETTERS]
TOKENS = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", *LETTERS, *WORDS]
KINDS = [UNKNOWN, CONTROL, CONTROL, BYTE, *[NORMAL] * (1 + len(LETTERS) + len(WORDS))]
NORMS = ("attn_norm", "ffn_norm")
WINDOWED = ("gemma2", "gemma3")
COHERE = ("command-r", "cohere2")
LAYER_NORMED = (*COHERE, "starcoder2", "stablelm")
BIASED_NORMS = ("gpt2", "starcoder2", "stablelm")
WITH_HEAD = (
    "llama",
    "mistral3",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "gemma3",
    "olmo2",
    "glm4",
    "exaone4",
    "stablelm",
)

QWEN2 = ("qwen2", "qwen2moe")
EXPERT_MATRICES = {
    "ffn_gate_inp": (EXPERTS, HIDDEN),
    "ffn_gate_exps": (EXPERTS, EXPERT_INNER, HIDDEN),
    "ffn_up_exps": (EXPERTS, EXPERT_INNER, HIDDEN),
    "ffn_down_exps": (EXPERTS, HIDDEN, EXPERT_INNER),
    "ffn_gate_inp_shexp": (HIDDEN,),
    "ffn_gate_shexp": (SHARED_INNER, HIDDEN),
    "ffn_up_shexp": (SHARED_INNER, HIDDEN),
    "ffn_down_shexp": (HIDDEN, SHARED_INNER),
}


def settings_of(architecture: str) -> dict[str, Any]:
    """Return the architecture's settings, without its name."""
    if architecture in OTHERS:
        return OTHERS[architecture].settings_of()
    settings: dict[str, Any] = {
        "block_count": LAYERS.get(architecture, 2),
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
    }
    if architecture == "gpt2":
        return settings | {"attention.layer_norm_epsilon": 1e-5}
    norm = "attention.layer_norm_rms_epsilon"
    if architecture in LAYER_NORMED:
        norm = "attention.layer_norm_epsilon"
    if architecture in COHERE:
        settings["logit_scale"] = 0.25
    if architecture in ("glm4", "stablelm"):
        settings["rope.dimension_count"] = WIDTH // 2
    settings |= {"attention.head_count_kv": 1, norm: 1e-5, "rope.freq_base": 1e4}
    if architecture == "cohere2":
        settings["attention.sliding_window"] = 8
    if architecture == "qwen2moe":
        settings |= {
            "expert_count": EXPERTS,
            "expert_used_count": 2,
            "expert_feed_forward_length": EXPERT_INNER,
            "expert_shared_feed_forward_length": SHARED_INNER,
        }
    if architecture in HYBRIDS:
        settings |= {"attention.head_count_kv": [0, 1, 0], "shortconv.l_cache": TAPS}
    if architecture == "lfm2moe":
        settings |= {
            "expert_count": EXPERTS,
            "expert_used_count": 2,
            "expert_feed_forward_length": EXPERT_INNER,
            "leading_dense_block_count": 1,
            "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        }
    if architecture in WINDOWED:
        settings |= {
            "attention.sliding_window": 8,
            "attention.key_length": WIDTH,
            "attention.value_length": WIDTH,
        }
    return settings


def tokenizer_of(tokens: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the tokenizer's settings, with further `tokens` and their types."""
    more = dict(tokens or {})
    names, kinds = [*TOKENS, *more], [*KINDS, *more.values()]
    return {
        "model": "llama",
        "tokens": names,
        "token_type": kinds,
        "scores": [0.0] * len(names),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def shapes_of(architecture: str, layers: int) -> dict[str, Any]:
    """Return the shape of each tensor by its name, or a list of its numbers."""
    if architecture in OTHERS:
        return OTHERS[architecture].shapes_of(len(TOKENS))
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN)}
    if architecture == "gpt2":
        shapes["position_embd.weight"] = (256, HIDDEN)
    if architecture in WITH_HEAD:
        shapes["output.weight"] = (len(TOKENS), HIDDEN)
    shapes["output_norm.weight"] = (HIDDEN,)
    if architecture in BIASED_NORMS:
        shapes["output_norm.bias"] = (HIDDEN,)
    if architecture in HYBRIDS:
        shapes["token_embd_norm.weight"] = shapes.pop("output_norm.weight")
        for block in range(layers):
            parts = _hybrid_block(architecture, block)
            shapes |= {f"blk.{block}.{part}": shape for part, shape in parts.items()}
        return shapes
    matrices, norms = _matrices(architecture), _norms(architecture)
    biased: set[str] = set()
    if architecture in ("gpt2", "starcoder2"):
        biased = {*matrices, *norms}
    if architecture in QWEN2:
        biased = {"attn_q", "attn_k", "attn_v"}
    if architecture == "stablelm":
        biased = set(NORMS)
    for block in range(layers):
        for part, shape in (matrices | {name: (size,) for name, size in norms.items()}).items():
            shapes[f"blk.{block}.{part}.weight"] = shape
            if part in biased:
                shapes[f"blk.{block}.{part}.bias"] = shape[:1]
    return shapes


def _hybrid_block(architecture: str, block: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a block of LFM2."""
    matrices = _matrices(architecture)
    mlp = {part: shape for part, shape in matrices.items() if part.startswith("ffn")}
    if architecture == "lfm2moe" and block:
        mlp = {part: shape for part, shape in EXPERT_MATRICES.items() if "shexp" not in part}
    mixer = {part: shape for part, shape in matrices.items() if part.startswith("attn")}
    mixer |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (WIDTH,))
    if block != 1:
        mixer = {
            "shortconv.conv": (HIDDEN, TAPS),
            "shortconv.in_proj": (3 * HIDDEN, HIDDEN),
            "shortconv.out_proj": (HIDDEN, HIDDEN),
        }
    parts = mixer | mlp | dict.fromkeys(NORMS, (HIDDEN,))
    found = {f"{part}.weight": shape for part, shape in parts.items()}
    return found | ({"exp_probs_b.bias": (EXPERTS,)} if "ffn_gate_inp" in mlp else {})


def _matrices(architecture: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a block's matrices."""
    matrices: dict[str, tuple[int, ...]] = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (WIDTH, HIDDEN),
        "attn_v": (WIDTH, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    if architecture == "gpt2":
        matrices = {"attn_qkv": (3 * HIDDEN, HIDDEN), **dict(list(matrices.items())[3:])}
    if architecture in ("gpt2", "starcoder2", "glm4"):
        del matrices["ffn_gate"]
    if architecture == "glm4":
        matrices["ffn_up"] = (2 * INNER, HIDDEN)
    if architecture == "qwen2moe":
        matrices = dict(list(matrices.items())[:4]) | EXPERT_MATRICES
    return matrices


def _norms(architecture: str) -> dict[str, int]:
    """Return the sizes of a block's norms."""
    norms = dict.fromkeys(NORMS, HIDDEN)
    if architecture in COHERE:
        del norms["ffn_norm"]
    if architecture in ("olmo2", "exaone4"):
        norms = {}
    if architecture == "olmo2":
        norms |= {"attn_q_norm": HIDDEN, "attn_k_norm": WIDTH}
    if architecture in ("qwen3", "gemma3", "exaone4"):
        norms |= {"attn_q_norm": WIDTH, "attn_k_norm": WIDTH}
    if architecture in (*WINDOWED, "olmo2", "glm4", "exaone4"):
        norms |= {"post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN}
    return norms


def write_tiny(
    path: Path,
    architecture: str = "llama",
    changes: Mapping[str, Any] | None = None,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write a file. None removes a setting or a tensor.

    `changes` are settings of the architecture without its name, `tokenizer` those behind
    tokenizer.ggml, `more` settings with their whole names. `tensors` maps names to shapes, or to
    lists of numbers. Each tensor has numbers that follow from its name.
    """
    writer = gguf.GGUFWriter(path, architecture)
    settings = settings_of(architecture) | dict(changes or {})
    named = {f"{architecture}.{key}": value for key, value in settings.items()}
    named |= {
        f"tokenizer.ggml.{key}": value
        for key, value in (tokenizer_of() | dict(tokenizer or {})).items()
    }
    for key, value in (named | dict(more or {})).items():
        if value is not None:
            add_setting(writer, key, value)
    shapes = shapes_of(architecture, settings["block_count"])
    for name, given in (shapes | dict(tensors or {})).items():
        if given is not None:
            is_numbers = isinstance(given, list)
            numbers = np.array(given, np.float32) if is_numbers else _numbers(name, given)
            writer.add_tensor(name, numbers)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return path


def _numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    draw = np.random.RandomState(sum(name.encode()))
    numbers = draw.standard_normal(shape).astype(np.float32)
    return 1 + 0.1 * numbers if name.endswith("norm.weight") else 0.3 * numbers


def add_setting(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    add[type(value)](key, value)
