"""The Model page of the demo against the shapes in its checkpoint's file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import safetensors

# The beginnings of the tensors' names that a box holds, without "model." and the layer.
BOXES = {
    "embed": ("embed_tokens.",),
    "blocks.0": ("layers.",),
    "blocks.0.attention_norm": ("layers.input_layernorm.",),
    "blocks.0.attention": ("layers.self_attn.",),
    "blocks.0.attention.qkv": tuple(f"layers.self_attn.{name}_proj." for name in "qkv"),
    "blocks.0.attention.out": ("layers.self_attn.o_proj.",),
    "blocks.0.mlp_norm": ("layers.post_attention_layernorm.",),
    "blocks.0.mlp": ("layers.mlp.",),
    "blocks.0.mlp.up": ("layers.mlp.up_proj.", "layers.mlp.gate_proj."),
    "blocks.0.mlp.down": ("layers.mlp.down_proj.",),
    "norm": ("norm.",),
}


def sizes_of(folder: Path) -> dict[str, int]:
    """The number of values of each tensor, by its name without the layer, over all layers."""
    found: dict[str, int] = {}
    with safetensors.safe_open(folder / "model.safetensors", "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (the file is no dict)
            parts = [part for part in name.split(".")[1:] if not part.isdigit()]
            size = math.prod(tensors.get_slice(name).get_shape())
            short = ".".join(parts)
            found[short] = found.get(short, 0) + size
    return found


def check_parameters(page: Any, folder: Path) -> None:
    """Each box has the parameters of its tensors, in all layers."""
    sizes = sizes_of(folder)
    total = sum(sizes.values())
    assert page.locator(".md-total").inner_text() == f"{total:,}"
    for box, starts in BOXES.items():
        expected = sum(size for name, size in sizes.items() if name.startswith(starts))
        shown = page.locator(f'.md-box[data-name="{box}"]')
        assert int(shown.get_attribute("data-parameters")) == expected, box
        share = shown.locator(":scope > .md-share b")
        assert share.inner_text() == f"{expected:,}", box
    boxes = {box.get_attribute("data-name") for box in page.locator(".md-box").all()}
    others = boxes - BOXES.keys()
    assert others == {"rotary", "head", "blocks.0.attention.attend"}
    for box in sorted(others):
        shown = page.locator(f'.md-box[data-name="{box}"]')
        assert shown.get_attribute("data-parameters") == "0", box
