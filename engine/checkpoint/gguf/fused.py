"""Tensors that llama.cpp's converter fuses on request: `--fuse-qkv` and `--fuse-gate-up-exps`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from engine.checkpoint.gguf.header import StoredTensor

Shape = tuple[int, ...]
QKV, APART = "attn_qkv", ("attn_q", "attn_k", "attn_v")
GATE_UP = "ffn_gate_up_exps"  # of each expert the rows of its gate, then those of its up
GATE_AND_UP = ("ffn_gate_exps", "ffn_up_exps")


def qkv_apart(
    tensors: Mapping[str, StoredTensor], known: Mapping[str, Shape]
) -> dict[str, StoredTensor]:
    """Return the tensors with queries, keys and values apart, where these are `known`.

    One with another number of rows than all three stays as it is.
    """
    found: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        names = [name.replace(f".{QKV}.", f".{part}.") for part in APART]
        if name in known or name in names or not all(each in known for each in names):
            found[name] = stored
            continue
        counts = [known[each][0] for each in names]
        rows, inputs = stored.shape[0], known[names[0]][1:]
        if rows != sum(counts) or stored.shape[1:] != inputs:
            found[name] = stored
            continue
        first = 0
        for each, count in zip(names, counts, strict=True):
            found[each] = _rows(stored, first, count)
            first += count
    return found


def with_fused_experts(required: Mapping[str, Shape], present: Collection[str]) -> dict[str, Shape]:
    """Return the `required` shapes in the form, fused or apart, in which a file has experts."""
    found = dict(required)
    for name in required:
        if not name.endswith(".weight"):
            continue
        gate, up = (name.replace(f".{GATE_UP}.", f".{part}.") for part in GATE_AND_UP)
        if name != gate and name not in present and gate in present:
            count, rows, inputs = found.pop(name)
            found |= dict.fromkeys((gate, up), (count, rows // 2, inputs))
        fused, up = (name.replace(GATE_AND_UP[0], part) for part in (GATE_UP, GATE_AND_UP[1]))
        if name != fused and fused in present:
            count, rows, inputs = found.pop(name)
            del found[up]
            found[fused] = (count, 2 * rows, inputs)
    return found


def _rows(stored: StoredTensor, first: int, count: int) -> StoredTensor:
    row = stored.nbytes // stored.shape[0]
    return replace(
        stored,
        shape=(count, *stored.shape[1:]),
        offset=stored.offset + first * row,
        nbytes=count * row,
    )
