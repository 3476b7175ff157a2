"""Tiny GGUF files whose next tokens by llama.cpp are in tests/data/llama_cpp.json.

`python -m tests.support.llama_cpp_cases` runs llama.cpp and writes that file. It needs a virtual
environment with `xllamacpp==2026.10.11549` and `gguf==0.19.0`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.support import tiny_gemma4, tiny_granite, tiny_latent, tiny_llamas
from tests.support.tiny_gguf import ARCHITECTURES, HIDDEN, INNER, LAYERS, TOKENS, WIDTH, write_tiny

ANSWERS = Path(__file__).parents[1] / "data" / "llama_cpp.json"
PROMPT = [1, *range(40, 160, 3)]
CANDIDATES = 6
ROPE = "rope.scaling."
ROTATING = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
YARN = {f"{ROPE}type": "yarn", f"{ROPE}factor": 4.0, f"{ROPE}original_context_length": 64}
UNREAD = {
    f"{ROPE}yarn_beta_fast": 16.0,
    f"{ROPE}yarn_beta_slow": 2.0,
    f"{ROPE}yarn_attn_factor": 2.0,
    f"{ROPE}yarn_ext_factor": 0.5,
}
BIASES = {
    "attn_q": HIDDEN,
    "attn_k": WIDTH,
    "attn_v": WIDTH,
    "attn_output": HIDDEN,
    "ffn_gate": INNER,
    "ffn_up": INNER,
    "ffn_down": HIDDEN,
}


class TinyCase(NamedTuple):
    architecture: str
    changes: Mapping[str, Any] = MappingProxyType({})
    tensors: Mapping[str, Any] = MappingProxyType({})

    def write(self, path: Path) -> Path:
        return write_tiny(path, self.architecture, self.changes, tensors=self.tensors)


def biases(*parts: str, blocks: int = 2) -> dict[str, Any]:
    names = {f"blk.{block}.{part}.bias": part for block in range(blocks) for part in parts}
    return {name: (BIASES[part],) for name, part in names.items()}


def rotary_cases() -> dict[str, TinyCase]:
    changes = {
        "attn_factor": {f"{ROPE}attn_factor": 0.5},
        "factor without type": {f"{ROPE}factor": 4.0},
        "linear": {f"{ROPE}type": "linear", f"{ROPE}factor": 4.0},
        "linear, attn_factor": {f"{ROPE}factor": 4.0, f"{ROPE}attn_factor": 0.7},
        "none, attn_factor": {f"{ROPE}type": "none", f"{ROPE}attn_factor": 0.7},
        "scale_linear": {"rope.scale_linear": 2.0},
        "yarn": YARN,
        "yarn, attn_factor": YARN | {f"{ROPE}attn_factor": 0.8},
        "yarn without original": {f"{ROPE}type": "yarn", f"{ROPE}factor": 4.0},
        "yarn with unread keys": YARN | UNREAD,
        "other base": {"rope.freq_base": 5e5},
        "no base": {"rope.freq_base": None},
    }
    found = {
        f"{name}: {case}": TinyCase(name, change)
        for name in ROTATING
        for case, change in changes.items()
    }
    factors = {"rope_freqs.weight": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]}
    return found | {
        "llama: none, factor": TinyCase("llama", {f"{ROPE}type": "none", f"{ROPE}factor": 4.0}),
        "llama: rope_freqs": TinyCase("llama", {}, factors),
        "llama: rope_freqs, linear": TinyCase("llama", {f"{ROPE}factor": 2.0}, factors),
        "llama: rope_freqs, attn_factor": TinyCase("llama", {f"{ROPE}attn_factor": 0.6}, factors),
    }


def window_cases() -> dict[str, TinyCase]:
    pattern = "attention.sliding_window_pattern"
    changes = {
        "every third layer": {pattern: 3},
        "all layers": {pattern: 0},
        "other base": {"rope.freq_base_swa": 500.0},
        "no window": {"attention.sliding_window": None},
        "final cap": {"final_logit_softcapping": 2.0},
    }
    found = {
        f"gemma3 window: {case}": TinyCase("gemma3", change) for case, change in changes.items()
    }
    for name in ("gemma2", "gemma3"):
        layers = [layer % 3 == 1 for layer in range(LAYERS[name])]
        found[f"{name} window: list"] = TinyCase(name, {pattern: layers})
    return found | {
        "gemma2 window: every third layer": TinyCase("gemma2", {pattern: 3}),
        "gemma2 window: default caps": TinyCase("gemma2"),
        "gemma2 window: caps": TinyCase(
            "gemma2", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 5.0}
        ),
    }


def family_cases() -> dict[str, TinyCase]:
    """Return what only some architectures compute, and what rotates differently in them."""
    window, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
    scale, short = "attention.temperature_scale", f"{ROPE}original_context_length"
    log, linear = f"{ROPE}yarn_log_multiplier", {f"{ROPE}factor": 4.0}
    layers = [layer % 3 == 1 for layer in range(4)]
    large, every_third = {"block_count": 64}, [layer % 3 == 1 for layer in range(64)]
    changes: dict[str, dict[str, dict[str, Any]]] = {
        "olmo2": {
            "linear": linear,
            "window": {window: 8},
            "window, linear": {window: 8} | linear,
            "window, yarn": {window: 8} | YARN,
            "window, yarn, attn_factor": {window: 8, f"{ROPE}attn_factor": 1.2} | YARN,
            "window, attn_factor": {window: 8, f"{ROPE}attn_factor": 0.5},
            "window, every third layer": {window: 8, pattern: 3},
            "window, list": {window: 8, pattern: layers},
        },
        "cohere2": {
            "every third layer": {pattern: 3},
            "list": {pattern: layers},
            "linear": linear,
            "yarn": YARN,
            "attn_factor": {f"{ROPE}attn_factor": 0.5},
            "logit_scale": {"logit_scale": 0.5},
            "no logit_scale": {"logit_scale": 0.0},
        },
        "command-r": {
            "linear": linear,
            "yarn": YARN,
            "no logit_scale": {"logit_scale": None},
        },
        "qwen2moe": {
            "yarn": YARN,
            "three experts": {"expert_used_count": 3},
            "default size": {"expert_feed_forward_length": None},
        },
        "glm4": {
            "all dimensions": {"rope.dimension_count": None},
            "a quarter": {"rope.dimension_count": 4},
            "linear": linear,
            "yarn": YARN,
            "attn_factor": {f"{ROPE}attn_factor": 0.5},
        },
        "exaone4": {
            "window of few layers": {window: 8, pattern: 2},
            "linear": linear,
            "yarn": YARN,
            "attn_factor": {f"{ROPE}attn_factor": 0.5},
            "64 layers": large,
            "64 layers, window, list": large | {window: 8, pattern: every_third},
            "64 layers, window, linear": large | {window: 8} | linear,
        },
        "starcoder2": {
            "unread window": {window: 8},
            "linear": linear,
            "yarn": YARN,
            "attn_factor": {f"{ROPE}attn_factor": 0.5},
        },
        "stablelm": {
            "all dimensions": {"rope.dimension_count": None},
            "parallel by key": {"use_parallel_residual": True},
            "linear": linear,
            "yarn": YARN,
            "attn_factor": {f"{ROPE}attn_factor": 0.5},
        },
        "lfm2": {
            "linear": linear,
            "yarn": YARN,
            "attn_factor": {f"{ROPE}attn_factor": 0.5},
            "other epsilon": {"attention.layer_norm_rms_epsilon": 0.1},
        },
        "lfm2moe": {
            "linear": linear,
            "three experts": {"expert_used_count": 3},
        },
        "mistral3": {
            "linear": linear,
            "yarn": YARN,
            "yarn, log_multiplier": YARN | {log: 1.0},
            "yarn, log_multiplier, attn_factor": YARN | {log: 0.5, f"{ROPE}attn_factor": 0.8},
            "yarn, beta_slow": YARN | {f"{ROPE}yarn_beta_slow": 3.0},
            "yarn, beta_fast": YARN | {f"{ROPE}yarn_beta_fast": 2.0},
            "yarn, temperature": YARN | {scale: 0.5, short: 16, log: 1.0},
            "temperature": {scale: 0.5, short: 16},
            "temperature, linear": {scale: 0.5, short: 16} | linear,
            "temperature, attn_factor": {scale: 0.5, short: 16, f"{ROPE}attn_factor": 0.7},
        },
    }
    return {
        f"{name} family: {case}": TinyCase(name, change)
        for name, each in changes.items()
        for case, change in each.items()
    }


def bias_cases() -> dict[str, TinyCase]:
    qkv, mlp = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up", "ffn_down")
    tensors = {
        "attention": biases(*qkv, "attn_output"),
        "queries, keys, values": biases(*qkv),
        "output": biases("attn_output"),
        "queries of the first block": biases("attn_q", blocks=1),
        "mlp": biases(*mlp),
        "down": biases("ffn_down"),
        "all": biases(*BIASES),
    }
    found = {f"llama biases: {case}": TinyCase("llama", {}, more) for case, more in tensors.items()}
    for name in ("qwen3", "gemma", "gemma2", "gemma3", "command-r", "cohere2"):
        blocks = LAYERS.get(name, 2)
        found[f"{name} biases"] = TinyCase(name, {}, biases(*qkv, blocks=blocks))
    without = dict.fromkeys(biases("attn_k"))
    return found | {
        "qwen2 biases: none of keys": TinyCase("qwen2", {}, without),
        "qwen2 biases: none": TinyCase("qwen2", {}, dict.fromkeys(biases(*qkv))),
        "qwen2moe biases: none": TinyCase("qwen2moe", {}, dict.fromkeys(biases(*qkv))),
    }


def optional_tensor_cases() -> dict[str, TinyCase]:
    """Return models with or without tensors that llama.cpp does not need."""
    head, factors = (len(TOKENS), HIDDEN), [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    blocks = ("blk.0", "blk.1")
    parallel = {f"{block}.ffn_norm.{kind}": None for block in blocks for kind in ("weight", "bias")}
    norms: dict[str, Any] = {f"{block}.attn_q_norm.weight": (2, WIDTH) for block in blocks}
    norms |= {f"{block}.attn_k_norm.weight": (1, WIDTH) for block in blocks}
    qkv = ("attn_q", "attn_k", "attn_v")
    tensors: dict[str, dict[str, dict[str, Any]]] = {
        "glm4": {"biases": biases(*qkv), "tied": {"output.weight": None}},
        "lfm2": {
            "head": {"output.weight": head},
            "other taps": {"blk.0.shortconv.conv.weight": [[0.5, 0.0, 0.25]] * HIDDEN},
        },
        "lfm2moe": {"no bias of experts": {"blk.1.exp_probs_b.bias": [0.0] * 4}},
        "exaone4": {"tied": {"output.weight": None}, "rope_freqs": {"rope_freqs.weight": factors}},
        "starcoder2": {
            "head": {"output.weight": head},
            "no bias of keys": dict.fromkeys(biases("attn_k")),
        },
        "stablelm": {
            "biases": biases(*qkv),
            "bias of the first queries": biases("attn_q", blocks=1),
            "parallel": parallel,
            "norms of heads": norms,
            "parallel, norms of heads": parallel | norms,
        },
    }
    return {
        f"{name} tensors: {case}": TinyCase(name, {}, more)
        for name, each in tensors.items()
        for case, more in each.items()
    }


def gemma4_cases() -> dict[str, TinyCase]:
    """Return the three kinds of Gemma 4, and what else changes the numbers of the dense one."""
    factor = f"{ROPE}factor"
    changes: dict[str, dict[str, Any]] = {
        "other window": {"attention.sliding_window": 5},
        "final cap": {"final_logit_softcapping": 2.0},
        "no final cap": {"final_logit_softcapping": 0.0},
        "default final cap": {"final_logit_softcapping": None},
        "other base": {"rope.freq_base": 5e3},
        "other base of windows": {"rope.freq_base_swa": 500.0},
        "default base": {"rope.freq_base": None},
        "default base of windows": {"rope.freq_base_swa": None},
        "linear": {factor: 4.0},
        "attn_factor": {f"{ROPE}attn_factor": 0.5},
        "linear, attn_factor": {factor: 2.0, f"{ROPE}attn_factor": 0.7},
    }
    found = {f"gemma4 family: {case}": TinyCase("gemma4", each) for case, each in changes.items()}
    factors = {"rope_freqs.weight": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]}
    all_turn = {"rope_freqs.weight": [1.0] * 8}
    head = {"output.weight": (len(TOKENS), HIDDEN)}
    experts, tensors = tiny_gemma4.experts()
    return found | {
        "gemma4 tensors: values": TinyCase("gemma4", {}, tiny_gemma4.values()),
        "gemma4 tensors: head": TinyCase("gemma4", {}, head),
        "gemma4 tensors: all turn": TinyCase("gemma4", {}, all_turn),
        "gemma4 tensors: other factors": TinyCase("gemma4", {}, factors),
        "gemma4 tensors: other factors, linear": TinyCase("gemma4", {factor: 2.0}, factors),
        "gemma4 kinds: shared": TinyCase("gemma4", *tiny_gemma4.shared()),
        "gemma4 kinds: experts": TinyCase("gemma4", experts, tensors),
        "gemma4 kinds: three experts": TinyCase(
            "gemma4", experts | {"expert_used_count": 3}, tensors
        ),
    }


def granite_cases() -> dict[str, TinyCase]:
    """Return Granite 4 with experts, with positions, and with other multipliers."""
    settings, tensors = tiny_granite.experts()
    changes: dict[str, dict[str, Any]] = {
        "positions": {f"{ROPE}finetuned": True},
        "default positions": {f"{ROPE}finetuned": None},
        "no scales": dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), 0.0),
        "default scale": {"attention.scale": None},
        "other epsilon": {"attention.layer_norm_rms_epsilon": 0.1},
    }
    found = {f"granitehybrid: {case}": TinyCase("granitehybrid", c) for case, c in changes.items()}
    head = {"output.weight": (len(TOKENS), HIDDEN)}
    biases = {"blk.1.attn_q.bias": (HIDDEN,), "blk.1.attn_output.bias": (HIDDEN,)}
    return found | {
        "granitehybrid: experts": TinyCase("granitehybrid", settings, tensors),
        "granitehybrid: head": TinyCase("granitehybrid", {}, head),
        "granitehybrid: biases": TinyCase("granitehybrid", {}, biases),
    }


def latent_cases() -> dict[str, TinyCase]:
    """Return DeepSeek-V3 and V2 with other routing, old weights, and yarn."""
    v2, without_bias = tiny_latent.of_v2()
    log = f"{ROPE}yarn_log_multiplier"
    groups = {"expert_group_count": 2, "expert_group_used_count": 1}
    changes: dict[str, dict[str, Any]] = {
        "groups": groups,
        "not renormalised": {"expert_weights_norm": None},
        "no scale": {"expert_weights_scale": None},
        "three experts": {"expert_used_count": 3},
        "yarn": YARN | {log: 0.1},
        "yarn, other scale": YARN | {log: 0.07},
        "other base": {"rope.freq_base": 5e5},
    }
    found = {f"deepseek2: {case}": TinyCase("deepseek2", each) for case, each in changes.items()}
    return found | {
        "deepseek2: of V2": TinyCase("deepseek2", v2, without_bias),
        "deepseek2: open of V2": TinyCase(
            "deepseek2", v2 | {"expert_gating_func": None}, without_bias
        ),
        "deepseek2: whole weights": TinyCase("deepseek2", *tiny_latent.old()),
    }


def close_to_llama_cases() -> dict[str, TinyCase]:
    """Return Mixtral, and what changes the numbers of other models that are close to Llama."""
    linear, factors = {f"{ROPE}factor": 4.0}, [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    lists = {"rope_factors_short.weight": factors[:4], "rope_factors_long.weight": factors[4:]}
    changes: dict[str, dict[str, dict[str, Any]]] = {
        "arcee": {"linear": linear, "yarn": YARN},
        "smollm3": {"linear": linear},
        "seed_oss": {"yarn": YARN},
        "chatglm": {"all dimensions": {"rope.dimension_count": None}},
        "gptneox": {
            "in turn": {"use_parallel_residual": False},
            "all dimensions": {"rope.dimension_count": None},
            "other base": {"rope.freq_base": 5e5},
        },
        "qwen3moe": {"three experts": {"expert_used_count": 3}, "yarn": YARN},
        "olmoe": {"three experts": {"expert_used_count": 3}},
        "phi3": {"all dimensions": {"rope.dimension_count": None}, "linear": linear},
        "gpt-oss": {
            "three experts": {"expert_used_count": 3},
            "other window": {"attention.sliding_window": 5},
            "every third layer": {"attention.sliding_window_pattern": 3},
            "linear": linear,
        },
    }
    found = {
        f"{name} close: {case}": TinyCase(name, change)
        for name, each in changes.items()
        for case, change in each.items()
    }
    qkv = ("attn_q", "attn_k", "attn_v")
    short, scale = {f"{ROPE}original_context_length": 64}, {f"{ROPE}attn_factor": 1.2}
    head = {"output.weight": (len(TOKENS), HIDDEN)}
    return found | {
        "llama close: Mixtral": TinyCase("llama", *tiny_llamas.mixtral()),
        "phi3 close: long factors": TinyCase("phi3", short | scale, lists),
        "phi3 close: short factors": TinyCase("phi3", scale, lists),
        "arcee close: rope_freqs": TinyCase("arcee", {}, {"rope_freqs.weight": factors}),
        "smollm3 close: head": TinyCase("smollm3", {}, head),
        "smollm3 close: biases": TinyCase("smollm3", {}, biases(*qkv, blocks=4)),
        **{f"{name} close: biases": TinyCase(name, {}, biases(*qkv)) for name in BIASED},
    }


BIASED = ("arcee", "seed_oss", "chatglm", "qwen3moe")


def layer_cases() -> dict[str, TinyCase]:
    found = {}
    for name in (*ROTATING, "gpt2"):
        layers = LAYERS.get(name, 2)
        same = {"attention.head_count": [2] * layers, "feed_forward_length": [INNER] * layers}
        if name != "gpt2":
            same["attention.head_count_kv"] = [1] * layers
        found[f"{name}: lists for layers"] = TinyCase(name, same)
    return found


CASES = (
    {f"{name}: plain": TinyCase(name) for name in ARCHITECTURES}
    | rotary_cases()
    | window_cases()
    | family_cases()
    | bias_cases()
    | optional_tensor_cases()
    | layer_cases()
    | gemma4_cases()
    | granite_cases()
    | latent_cases()
    | close_to_llama_cases()
)


def next_tokens(file: Path) -> list[list[float]]:
    """Return the most probable tokens after PROMPT by llama.cpp: [id, logarithm] each."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(file), 256, 1
    params.warmup, params.n_gpu_layers, params.cpuparams.n_threads = False, 0, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    request = {"prompt": PROMPT, "n_predict": 1, "temperature": 0, "ignore_eos": True}
    found = server.handle_completions(request | {"n_probs": CANDIDATES})
    [token] = found["choices"][0]["logprobs"]["content"]
    return [[entry["id"], round(entry["logprob"], 4)] for entry in token["top_logprobs"]]


def main() -> None:
    """Ask llama.cpp for the cases whose names begin with an argument; without any, for all."""
    answers = json.loads(ANSWERS.read_text()) if sys.argv[1:] else {}
    asked = [name for name in CASES if name.startswith(tuple(sys.argv[1:]) or "")]
    with tempfile.TemporaryDirectory() as folder:
        for name, case in ((name, CASES[name]) for name in asked):
            reader, writer = os.pipe()
            if not os.fork():  # a process for each, because the library ends on some files
                ids = next_tokens(case.write(Path(folder, "tiny.gguf")))
                os.write(writer, json.dumps(ids).encode())
                os._exit(0)
            os.close(writer)
            with os.fdopen(reader) as stream:
                answers[name] = json.loads(stream.read())
            os.wait()
            print(name, answers[name], file=sys.stderr)
    lines = [f"  {json.dumps(name)}: {json.dumps(ids)}" for name, ids in answers.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
