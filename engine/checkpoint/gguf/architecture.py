"""The names and the form of a GGUF file's tensors in a Hugging Face checkpoint.

llama.cpp's converter renames tensors, and changes some: it reorders the rows of Llama's queries and
keys for its rotary embedding, and adds 1 to Gemma's norms. Both are undone here.
"""

from __future__ import annotations

import re

from engine.checkpoint.gguf import delta, gemma4, gpt_oss, granite, latent, llamas
from engine.checkpoint.gguf.encoders import BERT_BLOCKS, BERT_NAMES
from engine.checkpoint.gguf.families import GEMMAS
from engine.checkpoint.gguf.gpt_oss import GPT_OSS
from engine.checkpoint.gguf.granite import GRANITE
from engine.checkpoint.gguf.hybrids import LFM2_NAMES
from engine.checkpoint.gguf.latent import LATENT
from engine.checkpoint.gguf.settings import DELTAS

LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA2_NAMES = LLAMA_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# OLMo 2 and EXAONE 4 have none of the other two norms.
OLMO2_NAMES = GEMMA2_NAMES
GLM4_NAMES = LLAMA_NAMES | {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
STARCODER2_NAMES = LLAMA_NAMES | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
STABLELM_NAMES = LLAMA_NAMES | {
    "attn_q_norm": "self_attn.q_layernorm.norms.{e}",
    "attn_k_norm": "self_attn.k_layernorm.norms.{e}",
}
QWEN2_MOE_NAMES = LLAMA_NAMES | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GPT2_NAMES = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
NAMES = {
    **dict.fromkeys(DELTAS, QWEN2_MOE_NAMES | delta.NAMES),
    **BERT_NAMES,
    "exaone4": OLMO2_NAMES,
    "gemma2": GEMMA2_NAMES,
    "gemma3": GEMMA2_NAMES,
    gemma4.GEMMA4: GEMMA2_NAMES | gemma4.NAMES,
    "gemma-embedding": GEMMA2_NAMES,
    "glm4": GLM4_NAMES,
    "gpt2": GPT2_NAMES,
    "lfm2": LFM2_NAMES,
    "lfm2moe": LFM2_NAMES,
    "olmo2": OLMO2_NAMES,
    **dict.fromkeys(("granitemoe", GRANITE), LLAMA_NAMES | granite.NAMES),
    LATENT: QWEN2_MOE_NAMES | latent.NAMES,
    "qwen2moe": QWEN2_MOE_NAMES,
    **dict.fromkeys(llamas.WITH_EXPERTS, QWEN2_MOE_NAMES),
    **{name: LLAMA_NAMES | names for name, names in llamas.NAMES.items()},
    "llama": LLAMA_NAMES | llamas.MIXTRAL_NAMES,
    "gptneox": llamas.NEOX_NAMES,
    GPT_OSS: LLAMA_NAMES | gpt_oss.NAMES,
    "stablelm": STABLELM_NAMES,
    "starcoder2": STARCODER2_NAMES,
}
BLOCKS = {
    "gpt2": "h",
    "gptneox": llamas.NEOX_BLOCKS,
    **BERT_BLOCKS,
}  # the beginning of the names in blocks
# Tensors that are no weight of a module in a checkpoint.
WHOLE_NAMES = {
    "lfm2moe": {"exp_probs_b.bias": "feed_forward.expert_bias"},
    gemma4.GEMMA4: gemma4.WHOLE_NAMES,
    GPT_OSS: gpt_oss.WHOLE_NAMES,
    GRANITE: granite.WHOLE_NAMES,
    LATENT: latent.WHOLE_NAMES,
    **dict.fromkeys(DELTAS, delta.WHOLE_NAMES),
}
JOINED = {
    **dict.fromkeys(("granitemoe", GRANITE), granite.JOINED),
    LATENT: latent.JOINED,
}
BLOCK = re.compile(r"blk\.(\d+)\.([\w.]+)")


def tensor_name(name: str, architecture: str, number: int = 0) -> str:
    """Return the tensor's name in a Hugging Face checkpoint. Unknown names stay as they are.

    `number` is that of an expert or a head, of a tensor that has all of them.
    """
    names = NAMES.get(architecture, LLAMA_NAMES)
    whole, whole_names = BLOCK.fullmatch(name), WHOLE_NAMES.get(architecture, {})
    if whole and whole[2] in whole_names:
        return f"model.layers.{whole[1]}.{whole_names[whole[2]]}"
    base, _, ending = name.rpartition(".")
    block = BLOCK.fullmatch(base)
    known = names.get(block[2] if block else base)
    if known is None:
        return name
    known = known.format(e=number)
    blocks = BLOCKS.get(architecture, "model.layers")
    return f"{blocks}.{block[1]}.{known}.{ending}" if block else f"{known}.{ending}"


def joined_names(name: str, architecture: str) -> tuple[str, ...]:
    """Return the names of the tensors that are one in a checkpoint, together with this one.

    The checkpoint's name is that of the first. Of a tensor that is whole in both, return none.
    """
    block = BLOCK.fullmatch(name.removesuffix(".weight"))
    for parts in JOINED.get(architecture, {}).values() if block else ():
        if block and block[2] in parts:
            return tuple(f"blk.{block[1]}.{part}.weight" for part in parts)
    return ()


def stored_offset(name: str, architecture: str) -> float:
    """Return what the converter has added to the tensor."""
    has_offset = architecture in (*GEMMAS, *DELTAS) and not name.endswith(".ssm_norm.weight")
    return 1.0 if has_offset and name.endswith("norm.weight") else 0.0


def is_transposed(name: str, architecture: str) -> bool:
    """Return whether a checkpoint stores the transposed tensor: GPT-2's Conv1D, or keys' weights.

    Those expand DeepSeek's latents.
    """
    matrices = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    of_gpt2 = architecture == "gpt2" and name.endswith(matrices)
    return of_gpt2 or name.endswith(".attn_k_b.weight")
