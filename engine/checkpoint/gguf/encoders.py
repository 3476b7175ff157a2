"""BERT, Nomic BERT, Jina v3 and ModernBERT in GGUF files, and how an encoder's file pools a text.

RoBERTa's files are BERT's: the converter removes the rows of positions that no text reaches.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engine.checkpoint.gguf.settings import (
    ENCODERS,
    HIDDEN_ACT,
    LAYER_NORM,
    Settings,
    architecture_of,
)
from engine.errors import ConfigError

Shape = tuple[int, ...]
TYPES = "token_types.weight"
TYPE_COUNT = "tokenizer.ggml.token_type_count"
BERT_BLOCKS = {
    "bert": "encoder.layer",
    "nomic-bert": "encoder.layers",
    "modern-bert": "layers",
    "jina-bert-v3": "encoder.layers",
}
BERT_NAMES = {
    "bert": {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    "nomic-bert": {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc11",
        "ffn_gate": "mlp.fc12",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    },
    "jina-bert-v3": {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
        "attn_qkv": "mixer.Wqkv",
        "attn_output": "mixer.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    },
    "modern-bert": {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    },
}
PERIOD = 3  # ModernBERT: one of this number of layers has no window, the first one of them
# llama.cpp's names of gated activations, as those of config.json.
ACTIVATIONS = {"gelu": "gelu", "geglu": "gelu", "silu": "silu", "swish": "silu", "swiglu": "silu"}
# llama.cpp's numbers of poolings -> the key of sentence-transformers.
POOLINGS = {
    1: "pooling_mode_mean_tokens",
    2: "pooling_mode_cls_token",
    3: "pooling_mode_lasttoken",
}


def bert_config(
    name: str, settings: Settings, own: Settings, tensors: Collection[str]
) -> dict[str, Any]:
    """Return the keys that only these have. Raises ConfigError for a value that is not served."""
    heads, shared = own["attention.head_count"], own["attention.head_count_kv"]
    width, hidden = own["attention.key_length"], own["embedding_length"]
    if shared != heads or width * heads != hidden:
        raise ConfigError(
            f"The GGUF file has {heads} heads of {width} dimensions and {shared} key/value heads "
            f"({name}.attention), for {name}.embedding_length {hidden}. Penstock serves {name} "
            "models with as many key/value heads as heads, which divide that length."
        )
    if name == "modern-bert":
        return _modern_bert_config(own)
    types = _type_count(settings) if TYPES in tensors else 1
    activation = "silu" if name == "nomic-bert" else "gelu"
    return {
        "type_vocab_size": types,
        "layer_norm_eps": own[LAYER_NORM],
        "hidden_act": activation,
    }


def _modern_bert_config(own: Settings) -> dict[str, Any]:
    activation = own.get(HIDDEN_ACT, "gelu")
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"The GGUF file has modern-bert.{HIDDEN_ACT} = {activation!r:.99}; served are "
            f"{', '.join(ACTIVATIONS)}."
        )
    layers, window = own["block_count"], own.get("attention.sliding_window")
    given = own.get("attention.sliding_window_pattern", PERIOD)
    if isinstance(given, list) and len(given) == layers:
        slides = [bool(each) for each in given]
    elif type(given) is int and given >= 0:
        slides = [not given or layer % given > 0 for layer in range(layers)]
    else:
        raise ConfigError(
            f"The GGUF file has modern-bert.attention.sliding_window_pattern = {given!r:.99}; it "
            f"must be a number such as {PERIOD}, or a list with an entry for each layer."
        )
    if window is not None and (type(window) is not int or window < 0):
        raise ConfigError(
            f"The GGUF file has modern-bert.attention.sliding_window = {window!r:.99}; it must be "
            "a whole number."
        )
    kinds = ("full_attention", "sliding_attention")
    return {
        "norm_eps": own[LAYER_NORM],
        "hidden_activation": ACTIVATIONS[activation],
        "layer_types": [kinds[slide and bool(window)] for slide in slides],
        **({"local_attention": window} if window else {}),
    }


def _type_count(settings: Settings) -> int:
    count = settings.get(TYPE_COUNT)
    if type(count) is not int or not 0 < count < 2**31:
        raise ConfigError(
            f"The GGUF file has {TYPE_COUNT} = {count!r:.99}; it must be a whole number above 0."
        )
    return count


def bert_tables(
    name: str, settings: Settings, own: Settings, vocab_size: int
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the tensors outside of blocks: those that must be there, and those that may."""
    hidden = own["embedding_length"]
    required: dict[str, Shape] = {
        "token_embd.weight": (vocab_size, hidden),
        "token_embd_norm.weight": (hidden,),
    }
    if name == "modern-bert":
        return required | {"output_norm.weight": (hidden,)}, {}
    required["token_embd_norm.bias"] = (hidden,)
    if name == "bert":
        required["position_embd.weight"] = (own["context_length"], hidden)
    return required, {TYPES: (_type_count(settings), hidden)}


def bert_block(name: str, own: Settings, number: int) -> dict[str, Shape]:
    """Return the tensors of block `number`, without their block's name."""
    hidden, inner = own["embedding_length"], own["feed_forward_length"]
    if name == "modern-bert":
        parts: dict[str, Shape] = {
            "attn_qkv": (3 * hidden, hidden),
            "attn_output": (hidden, hidden),
            "ffn_norm": (hidden,),
            "ffn_up": (2 * inner, hidden),
            "ffn_down": (hidden, inner),
        }
        if number:
            parts["attn_norm"] = (hidden,)
        return {f"{part}.weight": shape for part, shape in parts.items()}
    norms = dict.fromkeys(("attn_output_norm", "layer_output_norm"), (hidden,))
    parts = {
        "attn_output": (hidden, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        **norms,
    }
    if name == "bert":
        parts |= dict.fromkeys(("attn_q", "attn_k", "attn_v"), (hidden, hidden))
    else:
        parts["attn_qkv"] = (3 * hidden, hidden)
    if name == "nomic-bert":
        parts["ffn_gate"] = (inner, hidden)
    biased = norms if name == "nomic-bert" else parts
    return {f"{part}.weight": shape for part, shape in parts.items()} | {
        f"{part}.bias": parts[part][:1] for part in biased
    }


def pooling_files(settings: Settings) -> dict[str, Any]:
    """Return the files of sentence-transformers that say how a model pools; {} for others.

    llama.cpp's converter writes the pooling of a decoder only if the checkpoint has such files, as
    Qwen3-Embedding. It makes vectors of length 1. Raises ConfigError for a pooling that is not
    served.
    """
    name = architecture_of(settings)
    number = settings.get(f"{name}.pooling_type")
    if name not in ENCODERS and number in (None, 0):  # 0: none
        return {}
    if number is None:  # as sentence-transformers without such files
        number = 1
    if number not in POOLINGS:
        raise ConfigError(
            f"The GGUF file has {name}.pooling_type = {number!r:.99}; served are 1 (mean), 2 (cls) "
            "and 3 (last token)."
        )
    start = "sentence_transformers.models"
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    return {
        "modules.json": [
            {"idx": place, "name": str(place), "path": path, "type": f"{start}.{module}"}
            for place, (module, path) in enumerate(modules)
        ],
        "1_Pooling/config.json": {POOLINGS[number]: True},
    }
