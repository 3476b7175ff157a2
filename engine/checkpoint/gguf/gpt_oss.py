"""gpt-oss in GGUF files: experts with biases, and attention sinks.

The converter splits the rows of gates from those of ups. A checkpoint has them in turn: the gate's
first row, the up's first one, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.gguf.llamas import expert_shapes

Shape = tuple[int, ...]
Settings = Mapping[str, Any]
GPT_OSS = "gpt-oss"
NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
WHOLE_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
GATE, UP, DOWN = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"


def gpt_oss_config(own: Settings) -> dict[str, Any]:
    """Return the experts. Their rows are those of outputs, as in mxfp4 checkpoints."""
    return {
        "intermediate_size": own["expert_feed_forward_length"],
        "num_local_experts": own["expert_count"],
        "num_experts_per_tok": own["expert_used_count"],
        "expert_rows": "outputs",
    }


def gpt_oss_block(
    name: str, own: Settings, plain: dict[str, Shape], number: int
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the tensors that a block must have, from those of Llama's."""
    parts = {part: shape for part, shape in plain.items() if part.startswith("attn_")}
    parts |= {
        part.replace("weight", "bias"): shape[:1]
        for part, shape in parts.items()
        if part != "attn_norm.weight"
    }
    parts["attn_sinks.weight"] = (own["attention.head_count"],)
    parts["post_attention_norm.weight"] = plain["ffn_norm.weight"]
    experts = expert_shapes(own, own["expert_feed_forward_length"])
    parts |= experts
    parts["ffn_gate_inp.bias"] = experts["ffn_gate_inp.weight"][:1]
    for part in (GATE, UP, DOWN):
        parts[f"{part}.bias"] = experts[f"{part}.weight"][:2]
    return parts, {}
