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
