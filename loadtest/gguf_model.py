"""Convert the checkpoint of random_model.py to GGUF, the format of llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

FILE_TYPES = {
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
HEAD_OF = {"Q4_0": "Q8_0"}  # as our int4 has it; llama.cpp's own converter takes Q6_K


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write the Llama in `folder` to `path`, with matrices of `kind`, a key of FILE_TYPES."""
    c = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_rope_dimension_count(c["head_dim"])
    writer.add_rope_freq_base((c.get("rope_parameters") or c)["rope_theta"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    ids: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    ends = (c["bos_token_id"], c["eos_token_id"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=lambda token: ids[token]))
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if i in ends else kinds.NORMAL for i in range(len(ids))])
    writer.add_token_merges(["Ġ w"])  # an empty list is refused; prompts are token ids anyway
    writer.add_bos_token_id(ends[0])
    writer.add_eos_token_id(ends[1])
    for name, tensor in load_file(folder / "model.safetensors").items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        key = name.split(".")[-2]
        _add(writer, name, _interleaved(tensor, c[heads[key]]) if key in heads else tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows [heads * dim, in] so that rotary pairs are neighbours, as in llama.cpp."""
    pairs = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2)
    return pairs.reshape(weight.shape)


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> None:
    module = name.removesuffix(".weight")
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        name = f"blk.{layer}.{NAMES[module]}.weight"
    else:
        name = f"{NAMES[module]}.weight"
        kind = HEAD_OF.get(kind, kind)
    number = gguf.GGMLQuantizationType[kind if tensor.ndim == 2 else "F32"]
    numbers = tensor.float().contiguous().numpy()
    writer.add_tensor(name, gguf.quants.quantize(numbers, number), raw_dtype=number)
