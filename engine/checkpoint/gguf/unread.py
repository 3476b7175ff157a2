"""Settings of GGUF files that llama.cpp does not read, or whose value follows from others."""

from __future__ import annotations

from typing import Any

# Each may have the width of a head only.
WIDTHS = (
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count",
    "rope.dimension_count_swa",
)
# Each may have one of these values, which have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),  # False for encoders
    "attention.clamp_kqv": (0,),
    "attention.sliding_window": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0,),
    "nextn_predict_layers": (0,),
    "use_parallel_residual": (False,),
}
# llama.cpp's converter writes these for architectures for which llama.cpp does not read them. With
# other values than these the user is informed.
UNREAD: dict[str, tuple[Any, ...]] = {
    "attention.sliding_window": (0,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
}

# Keys of UNREAD that llama.cpp reads for an architecture, and that Penstock does not compute.
READ = {"lfm2": ("attention.sliding_window",)}
