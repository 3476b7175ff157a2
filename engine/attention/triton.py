"""Paged attention with our Triton kernels: the default on a GPU.

The decode kernel computes sequences with one new token, which come first in a step. The extend
kernel computes the others. Both read lengths and block tables on the device. A plan needs no length
on the host, so that a step can be captured.
"""

from __future__ import annotations

import torch
import triton

from engine.attention.backend import StepLayout
from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec
from engine.device.facts import gpu_has_bf16
from engine.kernels.triton.attention_tiles import MAX_HEAD_DIM, MAX_REST, Features, Scales
from engine.kernels.triton.decode_attention import decode_attention
from engine.kernels.triton.extend_attention import extend_attention
from engine.kernels.triton.kv_codes import store_codes
from engine.kernels.triton.store_kv import store_kv
from engine.ops.relative_bias import relative_buckets

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonBackend:
    """Supports every AttentionSpec with values of up to 512 numbers, on a GPU."""

    name = "triton"
    supports_capture = True
    reads_masked_keys = False
    transposes_keys = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

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
        return TritonPlan(layout)


class TritonPlan:
    """The layout of one step, and the relative biases that its layers share."""

    def __init__(self, layout: StepLayout) -> None:
        self.layout = layout
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
        shape = *query.shape[:2], spec.result_dim
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
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
        if decodes < len(lengths):
            if layout.query_lens is None:
                out[decodes:].zero_()  # the kernel does not write padding tokens: they may be NaN
            extend_attention(
                out,
                query,
                kv.keys,
                kv.values,
                tables[decodes:],
                layout.query_starts[decodes:],
                lengths[decodes:],
                features,
                causal=spec.kind == "causal",
                scales=scales,
            )
        return out

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
