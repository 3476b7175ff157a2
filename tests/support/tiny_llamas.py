"""The settings and tensors of tiny GGUF files of architectures that are close to Llama."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

HIDDEN, INNER, WIDTH, LAYERS = 32, 64, 16, 2
EXPERTS, EXPERT_INNER = 4, 32
KEY_WIDTHS = ("attention.key_length", "attention.value_length")
WITH_EXPERTS = ("qwen3moe", "olmoe", "gpt-oss")
PARTLY_ROTATED = ("chatglm", "gptneox", "phi3")
WITH_HEAD = ("gptneox", "olmoe", "gpt-oss")
OWN: dict[str, dict[str, Any]] = {
    "gptneox": {"use_parallel_residual": True, "attention.layer_norm_epsilon": 1e-5},
    "smollm3": {"block_count": 4},
    "olmoe": {"attention.head_count_kv": 2},  # llama.cpp needs as many as heads
    "phi3": {"attention.sliding_window": 0},
    "qwen3moe": {"expert_feed_forward_length": EXPERT_INNER},
    "gpt-oss": {
        "block_count": 3,
        "attention.sliding_window": 8,
        "expert_feed_forward_length": EXPERT_INNER,
    },
}
NAMES = (
    "arcee",
    "smollm3",
    "seed_oss",
    "chatglm",
    "phi3",
    "gptneox",
    "qwen3moe",
    "olmoe",
    "gpt-oss",
)


def settings_of(architecture: str) -> dict[str, Any]:
    """Return the architecture's settings, without its name."""
    settings: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": 2,
        "rope.freq_base": 1e4,
    }
    if architecture != "gptneox":
        settings |= {"attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-5}
    if architecture in PARTLY_ROTATED:
        settings["rope.dimension_count"] = WIDTH // 2
    if architecture in ("seed_oss", "gpt-oss"):
        settings |= dict.fromkeys(KEY_WIDTHS, WIDTH)
    if architecture in WITH_EXPERTS:
        settings |= {"expert_count": EXPERTS, "expert_used_count": 2}
    return settings | OWN.get(architecture, {})


def shapes_of(architecture: str, tokens: int) -> dict[str, Any]:
    """Return the shape of each tensor by its name."""
    shapes: dict[str, Any] = {
        "token_embd.weight": (tokens, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if architecture in WITH_HEAD:
        shapes["output.weight"] = (tokens, HIDDEN)
    if architecture == "gptneox":
        shapes["output_norm.bias"] = (HIDDEN,)
    parts = _block(architecture)
    for block in range(settings_of(architecture)["block_count"]):
        shapes |= {f"blk.{block}.{part}": shape for part, shape in parts.items()}
    return shapes


def _block(architecture: str) -> dict[str, tuple[int, ...]]:
    parts: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HIDDEN, HIDDEN),
        "attn_k.weight": (WIDTH, HIDDEN),
        "attn_v.weight": (WIDTH, HIDDEN),
        "attn_output.weight": (HIDDEN, HIDDEN),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (INNER, HIDDEN),
        "ffn_up.weight": (INNER, HIDDEN),
        "ffn_down.weight": (HIDDEN, INNER),
    }
    if architecture in ("phi3", "gptneox"):
        rows = 3 * HIDDEN if architecture == "gptneox" else HIDDEN + 2 * WIDTH
        parts = {name: shape for name, shape in parts.items() if name[:6] not in THREE}
        parts["attn_qkv.weight"] = (rows, HIDDEN)
    if architecture in ("arcee", "chatglm", "phi3", "gptneox"):
        del parts["ffn_gate.weight"]
    if architecture in ("chatglm", "phi3"):
        parts["ffn_up.weight"] = (2 * INNER, HIDDEN)
    if architecture in ("seed_oss", "gpt-oss"):
        parts["post_attention_norm.weight"] = parts.pop("ffn_norm.weight")
    if architecture == "olmoe":
        whole = ("attn_k.weight", "attn_v.weight")
        norms = ("attn_q_norm.weight", "attn_k_norm.weight")
        parts |= dict.fromkeys(whole, (HIDDEN, HIDDEN)) | dict.fromkeys(norms, (HIDDEN,))
    if architecture == "qwen3moe":
        parts |= dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), (WIDTH,))
    if architecture in WITH_EXPERTS:
        parts = {name: shape for name, shape in parts.items() if name not in MLP}
        parts |= experts(INNER if architecture == "olmoe" else EXPERT_INNER)
    if architecture in ("gptneox", "gpt-oss"):
        parts |= _biases(architecture, parts)
    return parts


THREE = ("attn_q", "attn_k", "attn_v")
MLP = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")


def _biases(architecture: str, parts: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    biases = {}
    for name, shape in parts.items():
        is_norm = architecture == "gpt-oss" and "norm" in name
        if not is_norm:
            biases[name.replace("weight", "bias")] = shape[:2] if "_exps" in name else shape[:1]
    if architecture == "gpt-oss":
        biases["attn_sinks.weight"] = (2,)
    return biases


def experts(inner: int) -> dict[str, tuple[int, ...]]:
    return {
        "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
        "ffn_gate_exps.weight": (EXPERTS, inner, HIDDEN),
        "ffn_up_exps.weight": (EXPERTS, inner, HIDDEN),
        "ffn_down_exps.weight": (EXPERTS, HIDDEN, inner),
    }


def mixtral() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings and tensors that make a tiny Llama a Mixtral."""
    tensors: dict[str, Any] = {}
    for block in ("blk.0", "blk.1"):
        tensors |= {f"{block}.{part}": None for part in MLP}
        tensors |= {f"{block}.{part}": shape for part, shape in experts(INNER).items()}
    return {"expert_count": EXPERTS, "expert_used_count": 2}, tensors


def modules() -> dict[str, Any]:
    """Return for each architecture what has its functions `settings_of` and `shapes_of`."""

    def of(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            settings_of=lambda: settings_of(name), shapes_of=lambda tokens: shapes_of(name, tokens)
        )

    return {name: of(name) for name in NAMES}
