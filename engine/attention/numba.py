"""Paged attention on a CPU with kernels that Numba compiles when a model is loaded.

Unlike `torch_backend`, the kernels copy no keys or values. Their cost depends on each sequence's
own length, not on the longest one. They do not use AMX, the matrix unit of some CPUs. On a CPU with
AMX, torch computes the prefill chunks.
"""

from __future__ import annotations

import torch

from engine.attention.kv_cache import LayerKV
from engine.attention.layout import StepLayout
from engine.attention.spec import AttentionSpec
from engine.attention.torch.backend import FusedAttention
from engine.attention.torch.batching import chunk_groups
from engine.device.facts import uses_amx
from engine.device.openmp import in_threads, parallel
from engine.kernels.numba.attention import TILE, attention_kernel, store_kernel
from engine.kernels.numba.call import LOG2_E, AttentionCall

DTYPES = (torch.bfloat16, torch.float32)
NO_WINDOW = 2**62


class NumbaBackend:
    """Supports causal layers without a bias, on a CPU. Stores the keys of a block transposed."""

    name = "numba"
    supports_capture = False  # it needs the sequence lengths on the host

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # With AMX, torch computes chunks, so a token has other bits in a chunk than as a decode.
        # The linear layers have the same effect with AMX.
        self._fuses = uses_amx(device, torch.bfloat16)
        self.reads_masked_keys = self._fuses  # torch gathers whole blocks

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        if self._device.type != "cpu":
            return f"needs a CPU, not {self._device}"
        if parallel() is None:
            return "needs a torch build that uses OpenMP threads"
        if dtype not in DTYPES:
            return f"supports {', '.join(map(str, DTYPES))}, not {dtype}"
        if spec.kind != "causal" or spec.relative is not None:
            return "supports only causal layers without a bias"
        if spec.head_dim % 8:
            return f"head_dim {spec.head_dim} is not a multiple of 8"
        return None

    def plan(self, layout: StepLayout) -> NumbaPlan:
        return NumbaPlan(layout, fuses=self._fuses)


class NumbaPlan:
    """The tasks of one step, and the arguments that the kernels take in every layer."""

    def __init__(self, layout: StepLayout, *, fuses: bool = False) -> None:
        """With `fuses`, torch's fused attention computes the chunks of layers that it supports."""
        self.layout = layout
        self._fuses = fuses and layout.num_decodes < len(layout.lengths)
        self._chunks: dict[tuple[int, AttentionSpec], list[FusedAttention]] = {}
        tasks = _tasks(layout, stores_chunks=self._fuses)
        self._tasks = torch.tensor(tasks)
        self._stores_ahead = any(task[-1] for task in tasks)
        self._calls: dict[tuple[int, AttentionSpec], AttentionCall] = {}

    def attend(
        self,
        spec: AttentionSpec,
        kv: LayerKV | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert kv is not None
        assert key is not None
        assert value is not None
        if (call := self._calls.get((kv.group, spec))) is None:
            call = self._calls[kv.group, spec] = self._call(spec, kv.group)
            if self._fuses and FusedAttention.honours(spec, query.dtype, query.device):
                call.num_attended = self.layout.num_decodes
        shared, dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
        out = torch.empty(query.shape, dtype=query.dtype)
        # The kernels expect the heads of a token to be contiguous.
        query, key, value = (
            x if x[0].is_contiguous() else x.contiguous() for x in (query, key, value)
        )
        call.query, call.query_stride = query.data_ptr(), query.stride(0)
        call.key, call.key_stride = key.data_ptr(), key.stride(0)
        call.value, call.value_stride = value.data_ptr(), value.stride(0)
        call.keys, call.values = kv.keys.data_ptr(), kv.values.data_ptr()
        call.out = out.data_ptr()
        size, half = self.layout.block_size, query.dtype == torch.bfloat16
        # Compile both kernels, even if only one is needed now: the first token of a model then
        # compiles everything that later steps use.
        store = store_kernel(dim, size, half)
        attention = attention_kernel(shared, dim, size, half)
        if self._stores_ahead:
            in_threads(store, call)
        if call.num_attended:
            in_threads(attention, call)
        if call.num_attended < call.num_tasks:
            keys = kv.keys.view(*kv.keys.shape[:2], dim, size).transpose(2, 3)
            turned = LayerKV(keys, kv.values, kv.group)
            for chunks in self._fused(kv.group, spec, query.dtype):
                chunks.attend(turned, query, out)
        return out

    def store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        raise AssertionError("only cross layers use store, and this backend does not support them")

    def _fused(self, group: int, spec: AttentionSpec, dtype: torch.dtype) -> list[FusedAttention]:
        """Return the fused attention of the step's chunks in layers of this spec."""
        if (chunks := self._chunks.get((group, spec))) is None:
            groups = chunk_groups(self.layout, self.layout.groups[group])
            size = self.layout.block_size
            chunks = [FusedAttention(each, spec, size, dtype, None) for each in groups]
            self._chunks[group, spec] = chunks
        return chunks

    def _call(self, spec: AttentionSpec, group: int) -> AttentionCall:
        tables = self.layout.groups[group].block_tables
        blocks, offsets = self.layout.slots(group)
        for tensor in (tables[0], blocks, offsets):
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()
        return AttentionCall(
            num_tasks=len(self._tasks),
            num_attended=len(self._tasks),
            tasks=self._tasks.data_ptr(),
            heads=spec.num_kv_heads,
            tables=tables.data_ptr(),
            table_stride=tables.stride(0),
            token_blocks=blocks.data_ptr(),
            token_offsets=offsets.data_ptr(),
            window=spec.window or NO_WINDOW,
            scale=spec.scale * LOG2_E,
            softcap=(spec.softcap or 0.0) * LOG2_E,
        )


def _tasks(layout: StepLayout, *, stores_chunks: bool) -> list[tuple[int, int, int, int, bool]]:
    """Return the units of work of a step, with the fields of TASK. Decodes come first, a task each.

    The last field says whether the task's KV is stored before any task attends. Tokens of a chunk
    need this because later ones read earlier ones. A token that fills a block needs it because
    another sequence of this step may read the block as a cached prefix. The KV of any other single
    token is read only by its own task, which stores it and so loads the block once.
    """
    assert layout.query_lens is not None, "the numba backend does not capture steps"
    assert layout.seq_lens is not None
    tasks, token, size = [], 0, layout.block_size
    for number, (count, length) in enumerate(zip(layout.query_lens, layout.seq_lens, strict=True)):
        for done in range(0, count, TILE):
            some, position = min(TILE, count - done), length - count + done
            chunk = stores_chunks and number >= layout.num_decodes
            ahead = chunk or some > 1 or (position + 1) % size == 0
            tasks.append((number, token + done, some, position, ahead))
        token += count
    return tasks
