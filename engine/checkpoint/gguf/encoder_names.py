"""The names of an image encoder's tensors in a GGUF sidecar, and in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

Names = Mapping[str, str]
# `{i}` is the number of a block.
SIGLIP = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.blk.{i}.ln1": "encoder.layers.{i}.layer_norm1",
    "v.blk.{i}.attn_q": "encoder.layers.{i}.self_attn.q_proj",
    "v.blk.{i}.attn_k": "encoder.layers.{i}.self_attn.k_proj",
    "v.blk.{i}.attn_v": "encoder.layers.{i}.self_attn.v_proj",
    "v.blk.{i}.attn_out": "encoder.layers.{i}.self_attn.out_proj",
    "v.blk.{i}.ln2": "encoder.layers.{i}.layer_norm2",
    "v.blk.{i}.ffn_up": "encoder.layers.{i}.mlp.fc1",
    "v.blk.{i}.ffn_down": "encoder.layers.{i}.mlp.fc2",
    "v.post_ln": "post_layernorm",
}
QWEN = {
    "v.patch_embd": "patch_embed.proj",
    "v.blk.{i}.ln1": "blocks.{i}.norm1",
    "v.blk.{i}.attn_qkv": "blocks.{i}.attn.qkv",
    "v.blk.{i}.attn_out": "blocks.{i}.attn.proj",
    "v.blk.{i}.ln2": "blocks.{i}.norm2",
}
QWEN25 = QWEN | {
    "v.blk.{i}.ffn_gate": "blocks.{i}.mlp.gate_proj",
    "v.blk.{i}.ffn_up": "blocks.{i}.mlp.up_proj",
    "v.blk.{i}.ffn_down": "blocks.{i}.mlp.down_proj",
    "v.post_ln": "merger.ln_q",
    "mm.0": "merger.mlp.0",
    "mm.2": "merger.mlp.2",
}
QWEN3 = QWEN | {
    "v.position_embd": "pos_embed",
    "v.blk.{i}.ffn_up": "blocks.{i}.mlp.linear_fc1",
    "v.blk.{i}.ffn_down": "blocks.{i}.mlp.linear_fc2",
    "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
}
DEEP = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}  # of v.deepstack.{layer}
GEMMA3_PROJECTION = "mm.input_projection"


def _under(prefix: str, names: Names) -> dict[str, str]:
    return {ours: prefix + theirs for ours, theirs in names.items()}


# clip.projector_type -> the names of its tensors, without their endings.
NAMES: Mapping[str, Names] = {
    "idefics3": _under("model.vision_model.", SIGLIP)
    | {"mm.model.fc": "model.connector.modality_projection.proj"},
    "gemma3": _under("vision_tower.", SIGLIP)
    | {
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        GEMMA3_PROJECTION: "multi_modal_projector.mm_input_projection",
    },
    "qwen2.5vl_merger": _under("visual.", QWEN25),
    "qwen3vl_merger": _under("model.visual.", QWEN3),
}


def encoder_names(projector: str, blocks: int, deep_layers: list[int]) -> dict[str, str]:
    """Return the names in a checkpoint by those in a sidecar, both without their endings.

    `deep_layers` are the layers of the tower with a merger of their own.
    """
    found: dict[str, str] = {}
    for ours, theirs in NAMES[projector].items():
        numbers = range(blocks) if "{i}" in ours else (0,)
        found |= {ours.format(i=number): theirs.format(i=number) for number in numbers}
    for number, layer in enumerate(deep_layers):
        for ours, theirs in DEEP.items():
            merger = f"model.visual.deepstack_merger_list.{number}.{theirs}"
            found[f"v.deepstack.{layer}.{ours}"] = merger
    return found
