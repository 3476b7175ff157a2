"""Paged attention with our Triton kernels: the default on a GPU.

The decode kernel computes sequences with one new token, which come first in a step. On some chips
it also norms, rotates and stores. The extend kernel computes the others. All read lengths and block
tables on the device. A plan needs no length on the host, so that a step can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import triton

from engine.attention.backend import StepLayout
from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec
from engine.device.facts import gpu_has_bf16
from engine.kernels.triton.attention_shapes import MAX_HEAD_DIM, MAX_REST, Features, Scales
from engine.kernels.triton.chips import features_of
from engine.kernels.triton.decode_attention import decode_attention
from engine.kernels.triton.decode_launch import (
    FUSED_BYTES,
    FUSED_DIMS,
    Slots,
    Turn,
    fused_decode_attention,
    new_counters,
)
from engine.kernels.triton.extend_attention import extend_attention
from engine.kernels.triton.kv_codes import store_codes
from engine.kernels.triton.store_kv import store_kv
from engine.ops.relative_bias import relative_buckets
from engine.ops.rotary import Rotation, norm_arguments, rotate_and_store

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonBackend:
    """Supports every AttentionSpec with values of up to 512 numbers, on a GPU."""

    name = "triton"
    supports_capture = True
    reads_masked_keys = False
    transposes_keys = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _counters(self) -> torch.Tensor | None:
        """The counters of fused decodes: all launches share them, as the device runs one at a time.

        None if the chip has none. The first plan is no captured one.
        """
        return new_counters(self._device) if features_of(self._device).fused_attention else None

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        if self._device.type != "cuda" and not triton.knobs.runtime.interpret:
            return f"needs a GPU, not {self._device}; tests set TRITON_INTERPRET=1"
        if dtype not in DTYPES:
            return f"supports {', '.join(map(str, DTYPES))}, not {dtype}"
        if self._device.type == "cuda" and dtype == torch.bfloat16 and not gpu_has_bf16():
            return "needs a GPU with bfloat16 instructions, or --dtype float32"
        if spec.result_dim > MAX_HEAD_DIM:
            return f"head_dim {spec.result_dim} is above the maximum of {MAX_HEAD_DIM}"
        if spec.head_dim - spec.result_dim > MAX_REST:
            rest = spec.head_dim - spec.result_dim
            return f"keys have {rest} numbers behind their values, above the maximum of {MAX_REST}"
        return None

    def plan(self, layout: StepLayout) -> TritonPlan:
        return TritonPlan(layout, self._counters)


class TritonPlan:
    """The layout of one step, and the relative biases that its layers share."""

    def __init__(self, layout: StepLayout, counters: torch.Tensor | None = None) -> None:
        """`counters` are those of fused decodes; None: the chip has none."""
        self.layout = layout
        self._counters = counters
        self._biases: dict[int, torch.Tensor] = {}  # by id of the table

    def attend(
        self,
        spec: AttentionSpec,
        kv: LayerKV | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layout = self.layout
        out = self._new_result(spec, query)
        distances = self._by_distance(spec, bias)
        features = Features(spec.scale, spec.window, spec.softcap, distances, sinks)
        if kv is None:
            assert key is not None
            assert value is not None
            starts = layout.query_starts
            lengths = layout.lengths
            extend_attention(out, query, key, value, None, starts, lengths, features, causal=False)
            return out
        if key is not None:
            self.store(kv, key, value)
        group = layout.groups[kv.group]
        tables = group.block_tables
        lengths = layout.lengths if group.key_lengths is None else group.key_lengths
        scales = _scales(kv)
        decodes = layout.num_decodes
        if decodes:
            decode_attention(
                out[:decodes],
                query[:decodes],
                kv.keys,
                kv.values,
                tables[:decodes],
                lengths[:decodes],
                features,
                scales,
            )
        self._extend(spec, kv, out, query, layout.query_starts, features)
        return out

    def _new_result(self, spec: AttentionSpec, query: torch.Tensor) -> torch.Tensor:
        """Return the memory [T, H, result_dim] of the result for T tokens of a layer."""
        shape = len(query), spec.num_heads, spec.result_dim
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
        decodes = self.layout.num_decodes
        if self.layout.query_lens is None and decodes < len(self.layout.lengths):
            out[decodes:].zero_()  # the kernel does not write padding tokens: they may be NaN
        return out

    def _extend(
        self,
        spec: AttentionSpec,
        kv: LayerKV,
        out: torch.Tensor,
        query: torch.Tensor,
        query_starts: torch.Tensor,
        features: Features,
    ) -> None:
        """Compute the sequences behind the decodes, if there are any. See `extend_attention`."""
        group, decodes = self.layout.groups[kv.group], self.layout.num_decodes
        lengths = self.layout.lengths if group.key_lengths is None else group.key_lengths
        if decodes == len(lengths):
            return
        extend_attention(
            out,
            query,
            kv.keys,
            kv.values,
            group.block_tables[decodes:],
            query_starts[decodes:],
            lengths[decodes:],
            features,
            causal=spec.kind == "causal",
            scales=_scales(kv),
            last_keys=self.layout.last_keys if spec.sees_whole_images else None,
        )

    def fuses(self, spec: AttentionSpec, kv: LayerKV) -> bool:
        return (
            self._counters is not None
            and spec.kind == "causal"
            and spec.relative is None
            and kv.values is not None
            and kv.key_scales is None
            and spec.head_dim in FUSED_DIMS
            and spec.head_dim * kv.keys.dtype.itemsize <= FUSED_BYTES
        )

    def rotate_and_attend(
        self,
        spec: AttentionSpec,
        kv: LayerKV,
        qk: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
        next_weights: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Decodes are fused in every step, so that their bits do not depend on the others in it."""
        assert self._counters is not None
        assert kv.values is not None
        layout, heads = self.layout, spec.num_heads
        group, decodes = layout.groups[kv.group], layout.num_decodes
        out = self._new_result(spec, qk)
        features = Features(spec.scale, spec.window, spec.softcap, sinks=sinks)
        if decodes:
            cos, sin = rotation.angles or (None, None)
            turn = Turn(cos, sin, **norm_arguments(rotation.norm), pairs=rotation.pairs)
            slots = Slots(
                kv.keys,
                kv.values,
                group.block_tables[:decodes],
                group.token_blocks[:decodes],
                layout.lengths[:decodes],
            )
            fused_decode_attention(
                out[:decodes],
                qk[:decodes],
                value[:decodes],
                turn,
                slots,
                features,
                self._counters,
                next_weights if decodes == len(qk) else (),
            )
        if decodes < len(qk):
            rest = slice(decodes, None)
            query = self._rotate_rest(kv, qk[rest], value[rest], heads, rotation)
            self._extend(spec, kv, out[rest], query, self._starts_of_rest, features)
        return out

    @cached_property
    def _starts_of_rest(self) -> torch.Tensor:
        """The first token of each sequence, counted from the first that is no decode."""
        return self.layout.query_starts - self.layout.num_decodes

    def _rotate_rest(
        self, kv: LayerKV, qk: torch.Tensor, value: torch.Tensor, heads: int, rotation: Rotation
    ) -> torch.Tensor:
        """Norm, rotate and store the tokens behind the decodes; return their queries [T, H, D]."""
        assert kv.values is not None
        rest = slice(self.layout.num_decodes, None)
        angles = rotation.angles
        if angles is not None:
            angles = angles[0][rest], angles[1][rest]
        blocks = self.layout.groups[kv.group].token_blocks[rest]
        cache = (kv.keys, kv.values, blocks, self.layout.token_offsets[rest])
        qkv = (qk[:, :heads], qk[:, heads:], value)
        return rotate_and_store(qkv, angles, cache, rotation.norm, pairs=rotation.pairs)

    def store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor | None) -> None:
        blocks = self.layout.groups[kv.group].token_blocks
        offsets = self.layout.token_offsets
        scales = _scales(kv)
        if scales is None:
            store_kv(kv.keys, kv.values, key, value, blocks, offsets)
        else:
            store_codes((kv.keys, kv.values), scales, key, value, blocks, offsets)

    def _by_distance(self, spec: AttentionSpec, table: torch.Tensor | None) -> torch.Tensor | None:
        """Return the bias [H, 2 * max_distance + 1] fp32 per distance, from `table` [buckets, H].

        Distances beyond max_distance have the same bias as max_distance.
        """
        relative = spec.relative
        if relative is None:
            return None
        assert table is not None
        bias = self._biases.get(id(table))
        if bias is None:
            farthest = relative.max_distance
            distance = torch.arange(-farthest, farthest + 1, device=table.device)
            buckets = relative_buckets(
                distance, relative.num_buckets, farthest, relative.bidirectional
            )
            bias = table[buckets].T.float().contiguous()
            self._biases[id(table)] = bias
        return bias


def _scales(kv: LayerKV) -> Scales:
    if kv.key_scales is None:
        return None
    return kv.key_scales, kv.key_scales if kv.value_scales is None else kv.value_scales
