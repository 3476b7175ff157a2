"""Write GGUF files of encoders with PyPI's `gguf`, as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from tests.support.gguf_files import (
    ARCHITECTURES,
    add_tensor,
    add_tokenizer,
    converted,
    name_map,
    tensors_of,
)

COUNTS = {
    "num_hidden_layers": "add_block_count",
    "hidden_size": "add_embedding_length",
    "intermediate_size": "add_feed_forward_length",
    "num_attention_heads": "add_head_count",
    "n_layers": "add_block_count",
    "dim": "add_embedding_length",
    "hidden_dim": "add_feed_forward_length",
    "n_heads": "add_head_count",
    "layer_norm_eps": "add_layer_norm_eps",
    "norm_eps": "add_layer_norm_eps",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "num_key_value_heads": "add_head_count_kv",
    "head_dim": "add_key_length",
    "local_attention": "add_sliding_window",
    "sliding_window": "add_sliding_window",
}
BASES = {"full_attention": "add_rope_freq_base", "sliding_attention": "add_rope_freq_base_swa"}
PREFIXES = ("bert.", "roberta.", "distilbert.", "nomic_bert.", "model.")
LEFT_OUT = ("pooler.", "position_ids")


def write_encoder(
    path: Path,
    folder: Path,
    architecture: str,
    settings: Mapping[str, Any] | None = None,
    **tokenizer: Any,
) -> Path:
    """Write the checkpoint in `folder` as a GGUF file.

    `settings` are added to the architecture's, and `tokenizer` to those of the tokenizer.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    for key, method in COUNTS.items():
        if config.get(key) is not None:
            getattr(writer, method)(config[key])
    if architecture == "gemma-embedding":
        writer.add_value_length(config["head_dim"])
    if architecture == "modern-bert":
        writer.add_string("modern-bert.hidden_activation", config["hidden_activation"])
    first = config["pad_token_id"] + 1 if "Roberta" in config["architectures"][0] else 0
    writer.add_context_length(config["max_position_embeddings"] - first)
    if "dim" in config:
        writer.add_layer_norm_eps(1e-12)
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    for kind, method in BASES.items():
        if kind in rope:
            getattr(writer, method)(rope[kind]["rope_theta"])
    if "layer_types" in config:
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(slides)
    if architecture != "gemma-embedding":
        writer.add_causal_attention(False)
        writer.add_token_type_count(config.get("type_vocab_size", 1))
    for key, value in (settings or {}).items():
        kind = gguf.GGUFValueType.get_type(value)
        if type(value) is int and value >= 0:  # llama.cpp reads no counts with a sign
            kind = gguf.GGUFValueType.UINT32
        writer.add_key_value(f"{architecture}.{key}", value, kind)
    add_tokenizer(writer, config["vocab_size"], **tokenizer)
    names = name_map(ARCHITECTURES[architecture])
    for name, tensor in tensors_of(folder).items():
        plain = name
        for prefix in PREFIXES:
            plain = plain.removeprefix(prefix)
        if any(part in plain for part in LEFT_OUT):
            continue
        stored = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        assert stored, plain
        found = converted(name, tensor, architecture, config)
        add_tensor(writer, stored, found[first:] if stored.startswith("position") else found, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
