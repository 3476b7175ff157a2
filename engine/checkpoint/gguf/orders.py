"""The order of rows and columns in GGUF files, where llama.cpp's converter changes it."""

from __future__ import annotations

import torch

from engine.checkpoint.gguf.delta import ENDINGS, RATE_NAMES, head_sizes
from engine.checkpoint.gguf.llamas import PERMUTED
from engine.checkpoint.gguf.settings import DELTAS, Settings
from engine.errors import ConfigError

# Rows of queries and keys.
PAIRED = ("llama", "mistral3", "granite", "granitemoe", "granitehybrid", *PERMUTED)
TILED = ("qwen35", "qwen35moe")  # value heads of these


def row_order(name: str, architecture: str, own: Settings, rows: int) -> torch.Tensor | None:
    """Return where the `rows` of a checkpoint's tensor are in the file's; None: in their places.

    `own` are the architecture's settings (`own_settings`). Of `ssm_out`, it is the order of
    columns. Raises ConfigError if the number of rows does not fit.
    """
    if architecture in DELTAS:
        return _value_order(name, architecture, own)
    if architecture == "gptneox" and ".attn_qkv." in name:
        return _by_heads(name, own["attention.head_count"], rows)
    if architecture not in PAIRED:
        return None
    keys = {".attn_q.": "attention.head_count", ".attn_k.": "attention.head_count_kv"}
    key = next((key for part, key in keys.items() if part in name), None)
    if key is None:
        return None
    heads = own[key]
    if rows % (2 * heads):
        raise ConfigError(f"{name} in the GGUF file has {rows} rows for {heads} heads.")
    # Of each head, the converter takes one row from each half in turn.
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _by_heads(name: str, heads: int, rows: int) -> torch.Tensor:
    """Return where rows are that a checkpoint has head by head: query, key and value of each."""
    if rows % (3 * heads):
        raise ConfigError(f"{name} in the GGUF file has {rows} rows for {heads} heads.")
    return torch.arange(rows).view(3, heads, -1).transpose(0, 1).flatten()


def rows_of_rates(own: Settings) -> dict[str, torch.Tensor]:
    """Return which rows of RATES have the strengths, and which the decays, by RATE_NAMES."""
    heads, groups = own["ssm.time_step_rank"], own["ssm.group_count"]
    rows = torch.arange(2 * heads).view(groups, 2, -1)
    return {part: rows[:, number].flatten() for number, part in enumerate(RATE_NAMES)}


def _value_order(name: str, architecture: str, own: Settings) -> torch.Tensor | None:
    """Return where a checkpoint's rows are in the tensor of a file; of `ssm_out`, its columns.

    None if they are in the same order.
    """
    if architecture not in TILED:
        return None
    part = name.split(".")[2] if name.startswith("blk.") else ""
    key_dim, value_dim = head_sizes(own)
    first = 2 * own["ssm.group_count"] * key_dim  # behind queries and keys
    if part in ("attn_qkv", "ssm_conv1d"):
        return torch.cat([torch.arange(first), first + _tiled(value_dim, own)])
    if part in ("attn_gate", "ssm_out"):
        return _tiled(value_dim, own)
    return _tiled(1, own) if part in (*ENDINGS, *RATE_NAMES) else None


def _tiled(size: int, own: Settings) -> torch.Tensor:
    """Return the places of the dimensions of all value heads, of `size` dimensions each."""
    keys, heads = own["ssm.group_count"], own["ssm.time_step_rank"]
    places = torch.arange(heads * size).view(heads // keys, keys, size)
    return places.transpose(0, 1).flatten()
