"""The tensors that a GGUF file of each architecture holds: their names there and their shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.checkpoint.gguf.delta import ENDINGS, delta_parts, recurrent_layers
from engine.checkpoint.gguf.encoders import TYPES, bert_block, bert_tables
from engine.checkpoint.gguf.fused import qkv_apart, with_fused_experts
from engine.checkpoint.gguf.gemma4 import GEMMA4, gemma4_shapes
from engine.checkpoint.gguf.gpt_oss import GPT_OSS, gpt_oss_block
from engine.checkpoint.gguf.granite import GRANITE, granite_block
from engine.checkpoint.gguf.header import Header, StoredTensor
from engine.checkpoint.gguf.hybrids import lfm2_block
from engine.checkpoint.gguf.kinds import KINDS
from engine.checkpoint.gguf.latent import LATENT, latent_block
from engine.checkpoint.gguf.llamas import (
    CLASSES,
    LONG_FACTORS,
    SHORT_FACTORS,
    has_mixtral_experts,
    llama_block,
)
from engine.checkpoint.gguf.llamas import WITH_HEAD as LLAMAS_WITH_HEAD
from engine.checkpoint.gguf.scale_tensors import with_scales
from engine.checkpoint.gguf.settings import (
    BERTS,
    DELTAS,
    MIXTURES,
    ROTATED,
    Settings,
    architecture_of,
    own_settings,
)
from engine.errors import ConfigError

Shape = tuple[int, ...]
ROPE_FACTORS = "rope_freqs.weight"
FACTORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)  # they become settings of config.json
ATTENTION = ("attn_q", "attn_k", "attn_v")
MLP = ("ffn_gate", "ffn_up", "ffn_down")
# llama.cpp reads no head for these, or does not use it.
TIED = ("gemma", "gemma2", "gemma-embedding", "command-r", "cohere2")
WITH_HEAD = (
    "olmo2",
    "qwen2moe",
    "stablelm",
    GPT_OSS,
    *LLAMAS_WITH_HEAD,
)  # and requires one for these
STACKED = "_exps"  # the end of a tensor's name that holds all experts
BIASED_NORMS = ("gpt2", "gptneox", "starcoder2", "stablelm")
# Parts of a block that always have a bias.
BIASED = {
    "starcoder2": ("attn_norm", "attn_output", "ffn_norm", "ffn_up", "ffn_down"),
    "stablelm": ("attn_norm", "ffn_norm"),
}
# Parts that some models have, in all blocks.
SOMETIMES = {"stablelm": ("ffn_norm", "attn_q_norm", "attn_k_norm")}
# Architectures whose blocks differ, and what computes the tensors of each block.
BLOCKS = {
    **dict.fromkeys(("lfm2", "lfm2moe"), lfm2_block),
    **dict.fromkeys(("granitemoe", GRANITE), granite_block),
    LATENT: latent_block,
    GPT_OSS: gpt_oss_block,
    **dict.fromkeys(CLASSES, llama_block),
}
HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
POST_NORMS = ("post_attention_norm", "post_ffw_norm")


class Shapes(NamedTuple):
    """The tensors that must be there, and those that may."""

    required: dict[str, Shape]
    optional: dict[str, Shape]


def has_bias(tensors: Collection[str], parts: Sequence[str]) -> bool:
    """Return whether one of these parts has a bias in any block."""
    endings = tuple(f".{part}.bias" for part in parts)
    return any(tensor.endswith(endings) for tensor in tensors)


def in_all_blocks(part: str, own: Settings, tensors: Collection[str]) -> bool:
    """Return whether all blocks have this part, or none. Raises ConfigError if only some have."""
    names = [f"blk.{number}.{part}.weight" for number in range(own["block_count"])]
    missing = [name for name in names if name not in tensors]
    if missing and len(missing) < len(names):
        raise ConfigError(
            f"The GGUF file lacks the tensor {missing[0]}, which it has for other blocks. Penstock "
            "serves models whose blocks are equal."
        )
    return not missing


def shapes_of(settings: Settings, vocab_size: int) -> Shapes:
    """Return the tensors of a model. Raises ConfigError if a setting is not served."""
    name, own = architecture_of(settings), own_settings(settings)
    if name == GEMMA4:
        return Shapes(*gemma4_shapes(own, vocab_size))
    hidden = own["embedding_length"]
    if name in BERTS:
        required, optional = bert_tables(name, settings, own, vocab_size)
        for number in range(own["block_count"]):
            parts = bert_block(name, own, number)
            required |= {f"blk.{number}.{part}": shape for part, shape in parts.items()}
        return Shapes(required, optional)
    required = {
        "token_embd.weight": (vocab_size, hidden),
        "output_norm.weight": (hidden,),
    }
    optional = {}
    if name in WITH_HEAD:
        required["output.weight"] = (vocab_size, hidden)
    elif name not in TIED:
        optional["output.weight"] = (vocab_size, hidden)
    if name in ("llama", "mistral3", "exaone4", "granite", "arcee"):
        optional[ROPE_FACTORS] = (own["attention.key_length"] // 2,)
    if name == "phi3":
        rotated = own.get(ROTATED, own["attention.key_length"])
        optional |= dict.fromkeys((SHORT_FACTORS, LONG_FACTORS), (rotated // 2,))
    if name == "gpt2":
        required["position_embd.weight"] = (own["context_length"], hidden)
    if name in BIASED_NORMS:
        required["output_norm.bias"] = (hidden,)
    if name in ("lfm2", "lfm2moe"):
        required["token_embd_norm.weight"] = required.pop("output_norm.weight")
    block = llama_block if has_mixtral_experts(name, own) else BLOCKS.get(name)
    if block is not None:
        plain = {f"{part}.weight": shape for part, shape in _block(name, own)[0].items()}
        for number in range(own["block_count"]):
            needed, others = block(name, own, plain, number)
            required |= {f"blk.{number}.{part}": shape for part, shape in needed.items()}
            optional |= {f"blk.{number}.{part}": shape for part, shape in others.items()}
        return Shapes(required, optional)
    of_block, with_bias = _gpt2_block(own) if name == "gpt2" else _block(name, own)
    always = {"gpt2": tuple(of_block), **BIASED}.get(name, ())
    for number, recurs in enumerate(recurrent_layers(name, own)):
        parts = of_block
        if recurs:
            attention = (*ATTENTION, "attn_output", *HEAD_NORMS)
            parts = {part: shape for part, shape in of_block.items() if part not in attention}
            parts |= delta_parts(name, own)
        for part, shape in parts.items():
            stored = f"blk.{number}.{part}"
            is_optional = part in SOMETIMES.get(name, ())
            ending = ENDINGS.get(part, f"{part}.weight")
            (optional if is_optional else required)[f"blk.{number}.{ending}"] = shape
            if part in with_bias or part in always:
                found = required if part in always and not is_optional else optional
                found[f"{stored}.bias"] = shape[:1]
    return Shapes(required, optional)


def _gpt2_block(own: Settings) -> tuple[dict[str, Shape], tuple[str, ...]]:
    hidden, inner = own["embedding_length"], own["feed_forward_length"]
    parts: dict[str, Shape] = {
        "attn_norm": (hidden,),
        "attn_qkv": (3 * hidden, hidden),
        "attn_output": (hidden, hidden),
        "ffn_norm": (hidden,),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    return parts, tuple(parts)


def _block(name: str, own: Settings) -> tuple[dict[str, Shape], tuple[str, ...]]:
    """Return the parts of a block with the shapes of their weights, and which may have a bias."""
    hidden, inner = own["embedding_length"], own["feed_forward_length"]
    width = own["attention.key_length"]
    queries = own["attention.head_count"] * width
    keys = own["attention.head_count_kv"] * width
    parts: dict[str, Shape] = {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    if name in ("qwen3", "qwen3vl", "gemma3", "gemma-embedding", "exaone4", *DELTAS):
        parts |= dict.fromkeys(HEAD_NORMS, (width,))
    if name in ("gemma2", "gemma3", "gemma-embedding", "olmo2", "glm4", "exaone4"):
        parts |= dict.fromkeys(POST_NORMS, (hidden,))
    if name in ("olmo2", "exaone4"):
        del parts["attn_norm"], parts["ffn_norm"]
        norms = {"attn_q_norm": (queries,), "attn_k_norm": (keys,)} if name == "olmo2" else {}
        return parts | norms, ()
    if name == "stablelm":
        heads, kv_heads = own["attention.head_count"], own["attention.head_count_kv"]
        parts |= {"attn_q_norm": (heads, width), "attn_k_norm": (kv_heads, width)}
    if name in ("glm4", "starcoder2"):
        del parts["ffn_gate"]
    if name == "glm4":
        parts["ffn_up"] = (2 * inner, hidden)
    if name in ("command-r", "cohere2"):
        del parts["ffn_norm"]
    if name in DELTAS:
        parts["attn_q"] = (2 * queries, hidden)  # with gates
        parts["post_attention_norm"] = parts.pop("ffn_norm")
    if name in MIXTURES:
        parts = {part: shape for part, shape in parts.items() if part not in MLP}
        parts |= _experts(own)
    if name in DELTAS:
        return parts, ()
    return parts, (*ATTENTION, "attn_output", *MLP) if name in ("llama", "granite") else ATTENTION


def _experts(own: Settings) -> dict[str, Shape]:
    """Return the shapes of a block's router, of all its experts together, and of the shared one."""
    hidden, count = own["embedding_length"], own["expert_count"]
    inner, shared = expert_sizes(own)
    return {
        "ffn_gate_inp": (count, hidden),
        f"ffn_gate{STACKED}": (count, inner, hidden),
        f"ffn_up{STACKED}": (count, inner, hidden),
        f"ffn_down{STACKED}": (count, hidden, inner),
        "ffn_gate_inp_shexp": (hidden,),
        "ffn_gate_shexp": (shared, hidden),
        "ffn_up_shexp": (shared, hidden),
        "ffn_down_shexp": (hidden, shared),
    }


def expert_sizes(own: Settings) -> tuple[int, int]:
    """Return the inner sizes of an expert and of the shared one, with llama.cpp's defaults."""
    inner = own["feed_forward_length"]
    one = own.get("expert_feed_forward_length", inner // own["expert_used_count"])
    return one, own.get("expert_shared_feed_forward_length", inner)


def split_parts(stored: StoredTensor) -> list[StoredTensor]:
    """Return the tensor of each expert or head, of one with all of them."""
    count = stored.shape[0]
    nbytes = stored.nbytes // count
    own = len(stored.scales) > 1
    return [
        replace(
            stored,
            shape=stored.shape[1:],
            offset=stored.offset + e * nbytes,
            nbytes=nbytes,
            scales=stored.scales[e : e + 1] if own else stored.scales,
        )
        for e in range(count)
    ]


def all_tensors(headers: Sequence[Header]) -> dict[str, StoredTensor]:
    """Return the tensors of all parts by their names in the files. Scales are in their weights.

    Raises ConfigError if a tensor is in two files, or scales do not fit.
    """
    found: dict[str, StoredTensor] = {}
    for header in headers:
        for name, stored in header.tensors.items():
            if name in found:
                raise ConfigError(
                    f"{name} is in both {found[name].file} and {stored.file}; remove one."
                )
            found[name] = stored
    return with_scales(found)


def absent_biases(
    architecture: str, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return zeros for biases that the model computes but that the files lack.

    A GGUF file may have any of them. A checkpoint has those of all layers and parts, or none.
    """
    if architecture in BERTS:  # of DistilBERT, files have no types
        embedding = tensors["token_embd.weight"]
        shape = (1, embedding.shape[-1])
        has_types = architecture == "modern-bert" or TYPES in tensors
        return {} if has_types else {TYPES: StoredTensor(embedding.file, KINDS[0], shape, 0, 0)}
    if architecture in ("gpt2", "gptneox", GPT_OSS):
        return {}
    groups: list[tuple[str, ...]] = [(*ATTENTION, "attn_output"), MLP]
    groups = [parts for parts in groups if has_bias(tensors, parts)]
    if architecture in ("glm4", "chatglm", "seed_oss", "stablelm") and groups:
        groups = [ATTENTION]  # never one of the output
    if architecture in ("qwen2", "qwen2moe", "qwen2vl", "starcoder2"):
        groups = [ATTENTION]  # always there; that of the output is never absent alone
    found: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        bias = name.removesuffix("weight") + "bias"
        is_weight = any(name.endswith(f".{part}.weight") for parts in groups for part in parts)
        if is_weight and stored.nbytes and bias not in tensors:
            found[bias] = StoredTensor(stored.file, KINDS[0], stored.shape[:1], 0, 0)
    return found


def checked_tensors(
    settings: Settings, vocab_size: int, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the tensors with the shapes that they should have.

    Writers differ in dimensions of size 1: as in llama.cpp, a vector may be stored as a matrix with
    one row. Raises ConfigError if a tensor is missing, not known, or has another shape.
    """
    name, shapes = architecture_of(settings), shapes_of(settings, vocab_size)
    shapes = shapes._replace(required=with_fused_experts(shapes.required, tensors))
    known = shapes.required | shapes.optional
    tensors = qkv_apart(tensors, known)
    if missing := [tensor for tensor in shapes.required if tensor not in tensors]:
        raise ConfigError(
            f"The GGUF file lacks the tensor {missing[0]}, which {name} models need. A split model "
            "needs all its parts in one folder."
        )
    found: dict[str, StoredTensor] = {}
    for tensor, stored in tensors.items():
        if tensor not in known:
            raise ConfigError(
                f"{stored.file} holds the tensor {tensor!r:.99}, which Penstock does not compute "
                f"for {name} models. Use another file of this model, or its original."
            )
        if _without_ones(stored.shape) != _without_ones(known[tensor]):
            raise ConfigError(
                f"{tensor} in {stored.file} has the shape {list(stored.shape)}; by the settings of "
                f"the file it should be {list(known[tensor])}."
            )
        found[tensor] = replace(stored, shape=known[tensor])
    return found


def _without_ones(shape: Shape) -> list[int]:
    return [size for size in shape if size != 1]
