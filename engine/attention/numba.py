"""Paged attention on a CPU with kernels that Numba compiles when a model is loaded.

Unlike the torch backend, the kernels copy no keys or values. Their cost depends on each sequence's
own length, not on the longest one. They do not use AMX, the matrix unit of some CPUs. On a CPU with
AMX, torch computes the prefill chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import GroupLayout, StepLayout
from engine.attention.kv_cache import LayerKV
from engine.attention.numba_tasks import PlanMemory, copy_layout, padding_tasks, step_tasks
from engine.attention.spec import AttentionSpec
from engine.attention.torch.batching import chunk_groups
from engine.attention.torch.fused import FusedAttention
from engine.attention.torch.whole_texts import text_blocks
from engine.device.facts import fuses_chunks
from engine.device.openmp import in_threads, parallel
from engine.kernels.numba.call import (
    AS_BF16,
    AS_E4M3,
    AS_FP32,
    AS_INT8,
    IN_PAIRS,
    LOG2_E,
    TASK,
    AttentionCall,
)
from engine.kernels.numba.cpu import has_avx512_bf16
from engine.kernels.numba.machine_code import kernel_store
from engine.kernels.numba.sequence_rows import decode_tasks

DTYPES = (torch.bfloat16, torch.float32)
NO_WINDOW = 2**62
TEXT_BLOCK = 64  # tokens of a text that are attended to together
MOST_HEADS = 16  # that a task computes together, if values are parts of keys
SIDE = 16  # of the squares that such values are transposed in
FORMS = {
    torch.float32: AS_FP32,
    torch.bfloat16: AS_BF16,
    torch.int8: AS_INT8,
    torch.float8_e4m3fn: AS_E4M3,
}


def attention_form(dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
    """Return the form of keys and values of a model of `dtype` for the kernel that attends."""
    is_bf16 = dtype == kv_dtype == torch.bfloat16
    return IN_PAIRS if is_bf16 and has_avx512_bf16() else FORMS[kv_dtype]


@dataclass(slots=True)
class SpecKernels:
    """The addresses of the kernels of layers with the same spec, and their next arguments."""

    store: int
    attention: int
    call: AttentionCall


class NumbaBackend:
    """Supports causal and full layers without a bias, on a CPU.

    It stores the keys of a block transposed.
    """

    name = "numba"
    supports_capture = False  # it needs the sequence lengths on the host
    transposes_keys = True

    def __init__(self, device: torch.device) -> None:
        """Raises ImportError if kernels can be neither loaded nor compiled."""
        kernel_store().check()
        self._device = device
        self._fuses_chunks = fuses_chunks(device)
        self.reads_masked_keys = self._fuses_chunks  # torch gathers whole blocks

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        if self._device.type != "cpu":
            return f"needs a CPU, not {self._device}"
        if parallel() is None:
            return "needs a torch build that uses OpenMP threads"
        if dtype not in DTYPES:
            return f"supports {', '.join(map(str, DTYPES))}, not {dtype}"
        if spec.kind == "cross" or spec.relative is not None:
            return "supports no cross layers, and no bias"
        if spec.head_dim % 8:
            return f"head_dim {spec.head_dim} is not a multiple of 8"
        if spec.value_dim is not None and spec.value_dim % SIDE:
            return f"values of {spec.value_dim} numbers of a key are not a multiple of {SIDE}"
        return None

    def plan(self, layout: StepLayout) -> NumbaPlan:
        if layout.query_lens is None:
            return self._decode_plan(layout)
        fuses_chunks = self._fuses_chunks and layout.num_decodes < len(layout.lengths)
        tasks = np.array(step_tasks(layout, stores_chunks=fuses_chunks), dtype=TASK)
        return NumbaPlan(layout, tasks, fuses_chunks=fuses_chunks)

    def _decode_plan(self, layout: StepLayout) -> NumbaPlan:
        """Return the plan of a step that is recorded with the kernel that writes its tasks."""
        assert layout.num_decodes == len(layout.lengths), "chunks need their lengths on the host"
        both = decode_tasks(layout.lengths, layout.block_size).numpy()
        tasks, reading_tasks = both.view(TASK)[..., 0]
        return NumbaPlan(
            layout, tasks, fuses_chunks=False, stores_ahead=True, reading_tasks=reading_tasks
        )

    def recorded_plan(self, layout: StepLayout, memory: PlanMemory, rows: int) -> NumbaPlan:
        """Return the plan of a recorded step of `rows` tokens, for `NumbaPlan.follow`.

        Every kernel that a step of this size may need is launched.
        """
        return NumbaPlan(
            memory.layout(layout, rows), memory.tasks[:rows], fuses_chunks=False, stores_ahead=True
        )


class NumbaPlan:
    """The tasks of one step, and the arguments that the kernels take in every layer."""

    def __init__(
        self,
        layout: StepLayout,
        tasks: npt.NDArray[np.void],
        *,
        fuses_chunks: bool,
        stores_ahead: bool = False,
        reading_tasks: npt.NDArray[np.void] | None = None,
    ) -> None:
        """With `fuses_chunks`, torch computes the chunks of layers that FusedAttention supports.

        With `stores_ahead`, the kernel that stores KV ahead runs even if no task needs it.
        `reading_tasks` are the same tasks with all KV stored ahead, if a kernel writes both.
        """
        self.layout = layout
        self.fuses_chunks = fuses_chunks
        self._tasks = tasks
        self._num_tasks = len(tasks)
        self._stores_ahead = stores_ahead or bool(tasks["is_stored_ahead"].any())
        # Where the KV of all tasks is stored before: by the kernel that does, or an earlier layer.
        if reading_tasks is None:
            reading_tasks = tasks.copy()
            reading_tasks["is_stored_ahead"] = True
        self._reading_tasks = reading_tasks
        # By KV group, spec, and whether the layer only reads KV.
        self._kernels: dict[tuple[int, AttentionSpec, bool], SpecKernels] = {}
        self._chunks: dict[tuple[int, AttentionSpec], list[FusedAttention]] = {}
        # Of texts, which have no KV cache: their blocks in this step, and KV by heads and head_dim.
        self._num_tokens = sum(layout.query_lens or ())
        self._texts: GroupLayout | None = None
        self._text_kvs: dict[tuple[int, int], LayerKV] = {}

    def follow(self, other: NumbaPlan) -> None:
        """Take over the inputs of a step of at most as many tokens, in the same memory.

        The other tokens become padding. `set_counts` must be called next.
        """
        count, padding = other._num_tasks, len(self._tasks) - other._num_tokens
        self._num_tasks = count + padding
        self._tasks[:count] = other._tasks
        self._tasks[count : count + padding] = padding_tasks(other.layout, padding)
        self._reading_tasks[: count + padding] = self._tasks[: count + padding]
        self._reading_tasks["is_stored_ahead"] = True
        copy_layout(self.layout, other.layout)

    def set_counts(self, call: AttentionCall) -> None:
        """Set what depends on the number of tasks in the recorded arguments of a layer."""
        call.num_tasks = call.num_attended = self._num_tasks
        if not call.values:
            heads = call.parts * call.shared
            call.parts = _parts_of_heads(heads, call.heads, self._num_tasks)
            call.shared = heads // call.parts

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
        is_text = kv is None
        if kv is None:
            assert key is not None
            kv = self._text_kv(key)
        only_reads = key is None
        # Several threads may share a task, and none of them stores its KV. The tokens of a text see
        # later ones.
        stores_ahead = is_text or spec.value_dim is not None
        kernels = self._kernels.get((kv.group, spec, only_reads))
        if kernels is None:
            kernels = self._make_kernels(kv, spec, query.dtype)
            if only_reads or stores_ahead:
                kernels.call.tasks = self._reading_tasks.ctypes.data
            self._kernels[kv.group, spec, only_reads] = kernels
        query = _contiguous_heads(query)
        out = torch.empty(*query.shape[:2], spec.result_dim, dtype=query.dtype)
        call = kernels.call
        call.query = query.data_ptr()
        call.query_stride = query.stride(0)
        if key is not None:
            key = _contiguous_heads(key)
            call.key = key.data_ptr()
            call.key_stride = key.stride(0)
        if value is not None:
            value = _contiguous_heads(value)
            call.value = value.data_ptr()
            call.value_stride = value.stride(0)
        call.keys = kv.keys.data_ptr()
        call.values = 0 if kv.values is None else kv.values.data_ptr()
        if kv.key_scales is not None:
            value_scales = kv.key_scales if kv.value_scales is None else kv.value_scales
            call.key_scales = kv.key_scales.data_ptr()
            call.value_scales = value_scales.data_ptr()
        if sinks is not None:
            assert sinks.dtype == query.dtype
            call.sinks = sinks.data_ptr()
        call.out = out.data_ptr()
        if (self._stores_ahead or stores_ahead) and not only_reads:
            in_threads(kernels.store, call)
        if call.num_attended:
            in_threads(kernels.attention, call)
        if call.num_attended < call.num_tasks:
            self._attend_chunks(spec, kv, query, out)
        if is_text:
            out[self._num_tokens :] = 0  # padding
        return out

    def _text_kv(self, key: torch.Tensor) -> LayerKV:
        """Return blocks for the keys and values of this step's texts, the same for all layers."""
        group = len(self.layout.groups)
        if self._texts is None:
            self._texts = text_blocks(self.layout, TEXT_BLOCK)
            self._text_offsets = self.layout.positions % TEXT_BLOCK
        heads, dim = key.shape[1:]
        known = self._text_kvs.get((heads, dim))
        if known is None:
            assert self.layout.seq_lens is not None
            size = TEXT_BLOCK
            blocks = 1 + sum(-(-length // size) for length in self.layout.seq_lens)
            keys = key.new_empty(blocks, heads, dim, size)
            known = LayerKV(keys, keys.new_empty(blocks, heads, size, dim), group)
            self._text_kvs[heads, dim] = known
        return known

    def store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor | None) -> None:
        raise AssertionError("only cross layers use store, and this backend does not support them")

    def _attend_chunks(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Compute the step's chunks with torch's kernel and write them to `out` [T, H, D]."""
        chunks = self._chunks.get((kv.group, spec))
        if chunks is None:
            size = self.layout.block_size
            groups = chunk_groups(self.layout, self.layout.groups[kv.group])
            chunks = [FusedAttention(group, spec, size, query.dtype, None) for group in groups]
            self._chunks[kv.group, spec] = chunks
        assert kv.values is not None
        num_blocks, heads, size, dim = kv.values.shape
        keys = kv.keys.view(num_blocks, heads, dim, size).transpose(2, 3)
        blocks = replace(kv, keys=keys)
        for chunk in chunks:
            chunk.rows.write(chunk(blocks, query), out)

    def _make_kernels(self, kv: LayerKV, spec: AttentionSpec, dtype: torch.dtype) -> SpecKernels:
        """Compile both kernels, even if only one is needed now.

        The first token of a model then compiles everything that later steps use.
        """
        is_half = dtype == torch.bfloat16
        form = FORMS[kv.keys.dtype]
        call = self._make_call(kv.group, spec)
        device = self.layout.positions.device
        is_fused = self.fuses_chunks and spec.kind == "causal"
        if is_fused and FusedAttention.supports(spec, dtype, device):
            call.num_attended = self.layout.num_decodes
        return SpecKernels(
            store=kernel_store().address("store_kv.store_kernel", is_half, form),
            attention=kernel_store().address(
                "attention.attention_kernel", is_half, attention_form(dtype, kv.keys.dtype)
            ),
            call=call,
        )

    def _make_call(self, group: int, spec: AttentionSpec) -> AttentionCall:
        layout, offsets, size = self.layout, self.layout.token_offsets, self.layout.block_size
        if group == len(layout.groups):
            assert self._texts is not None
            own, offsets, size = self._texts, self._text_offsets, TEXT_BLOCK
        else:
            own = layout.groups[group]
        tables, blocks = own.block_tables, own.token_blocks
        for tensor in (tables[0], blocks, offsets):
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()
        assert spec.head_dim % 8 == size % 16 == 0
        parts = _parts(spec, self._num_tasks)
        last_keys = layout.last_keys if spec.sees_whole_images else None
        return AttentionCall(
            num_tasks=self._num_tasks,
            num_attended=self._num_tasks,
            tasks=self._tasks.ctypes.data,
            heads=spec.num_kv_heads,
            parts=parts,
            shared=spec.num_heads // spec.num_kv_heads // parts,
            dim=spec.head_dim,
            value_dim=spec.result_dim,
            block_size=size,
            tables=tables.data_ptr(),
            table_stride=tables.stride(0),
            token_blocks=blocks.data_ptr(),
            token_offsets=offsets.data_ptr(),
            window=spec.window or NO_WINDOW,
            later=0 if spec.kind == "causal" else (spec.window or NO_WINDOW) - 1,
            last_keys=0 if last_keys is None else last_keys.data_ptr(),
            scale=spec.scale * LOG2_E,
            softcap=(spec.softcap or 0.0) * LOG2_E,
        )


def _parts(spec: AttentionSpec, tasks: int) -> int:
    """Return how many parts the query heads of a kv head are computed in. No bit depends on it."""
    if spec.value_dim is None:
        return 1
    return _parts_of_heads(spec.num_heads // spec.num_kv_heads, spec.num_kv_heads, tasks)


def _parts_of_heads(heads: int, kv_heads: int, tasks: int) -> int:
    """Return the parts of the `heads` of a kv head, if values are parts of keys.

    Each part transposes a block's values, so there are only as many as give all threads a part.
    """
    idle = -(-torch.get_num_threads() // (tasks * kv_heads))
    wanted = max(idle, -(-heads // MOST_HEADS))
    return next((parts for parts in range(wanted, heads) if heads % parts == 0), heads)


def _contiguous_heads(x: torch.Tensor) -> torch.Tensor:
    """Return x [T, H, D] such that the heads of each token are contiguous, as kernels expect."""
    return x if x[0].is_contiguous() else x.contiguous()
