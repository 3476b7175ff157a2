"""The engine's start and end: progress, facts about the loaded model, and why it ended."""

from __future__ import annotations

import signal
from typing import Literal

from engine.protocol.message import Message, Record

# Why the last bits of a sequence's logits depend on the other sequences in its step: the CPU's
# matrix unit (AMX) where oneDNN uses it, an old oneDNN, or weights that are not prepacked. None: no
# known reason.
BatchVariance = Literal["amx", "onednn", "unpacked", "gpu"] | None


# Why the bits of logits depend on the batch, and what prevents it.
BATCH_VARIANCE: dict[BatchVariance, tuple[str, str]] = {
    "amx": ("oneDNN computes bf16 with AMX", "use --batch-invariant on (slower)"),
    "onednn": (
        "oneDNN in this version of torch splits a sum across threads",
        "use torch 2.11 or newer, or --threads 1",
    ),
    "unpacked": (
        "linear weights are not stored in oneDNN's layout",
        "use --prepack and a torch build with oneDNN",
    ),
    "gpu": ("a GPU chooses the order of a sum by the tokens in a step", "use --device cpu"),
}


# Not a message but a signal: the engine process writes the stacks of its threads to stderr.
DUMP_STACKS = signal.SIGUSR1


ModelKind = Literal["decoder", "encoder", "encoder-decoder"]


class Shutdown(Message, frozen=True):
    """End the engine now and drop all unfinished requests."""


class Progress(Message, frozen=True):
    """Progress of loading the model."""

    stage: str  # a short phrase that starts with a present participle, such as "loading weights"
    fraction: float  # from 0 to 1


class KVGroup(Record, frozen=True):
    """A group of layers that keep the KV of the same tokens and share one block table per sequence.

    A query sees the last `window` keys, including its own. Blocks before the window are released.
    """

    layers: int
    window: int | None = None  # None: a query sees all keys
    is_cross: bool = False  # cross-attention KV of the encoder prompt, written once

    def first_visible_block(self, position: int, block_size: int) -> int:
        """Index of the first block that a query at `position` or later sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def max_blocks(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """Most blocks that a sequence of `tokens` holds at once.

        A step computes at most `step_tokens` of its tokens.
        """
        blocks = -(-tokens // block_size)
        if self.window is None:
            return blocks
        return min(blocks, -(-(self.window - 1 + step_tokens) // block_size) + 1)


class MemoryEntry(Record, frozen=True):
    """Bytes that one use of device memory takes: planned from shapes, and measured after loading.

    `name` is the use, for example "weights" or "KV cache".
    """

    name: str
    planned: int
    measured: int | None = None  # None: not measured on this device


class Ready(Message, frozen=True):
    """The engine can serve: facts about the loaded model and its limits."""

    architecture: str
    kind: ModelKind
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and answer together
    block_size: int  # tokens per KV block
    num_blocks: int  # usable blocks; one holds block_size tokens of one of `kv_groups`
    max_num_seqs: int
    max_num_batched_tokens: int
    parameters: int  # number of model parameters
    weight_bytes: int  # of all ranks, as is the next field
    kv_cache_bytes: int
    load_seconds: float
    attention_backend: str
    threads: int  # CPU threads of the engine
    kv_groups: tuple[KVGroup, ...]
    num_state_slots: int = 0  # of recurrent layers: for running sequences and snapshots
    state_bytes: int = 0  # of one slot, of rank 0
    start_token: int | None = None  # first decoder token of an encoder-decoder
    embedding_size: int = 0  # length of an encoder's vectors; 0 for other kinds of model
    batch_variance: BatchVariance = None
    amx_note: str = ""  # why our own kernels do not use the AMX that the CPU has
    emulates_bf16: bool = False  # bf16 without bf16 instructions: many rows are slower than fp32
    max_num_encoder_tokens: int = 0  # token budget of the encoder's part of a step
    # By how much a step may exceed `max_num_batched_tokens`, if one step computes a whole image.
    image_tokens: int = 0
    context_cost: float = 0.0  # of a prompt token, for each token of context; the rest costs 1
    memory: tuple[MemoryEntry, ...] = ()  # of rank 0
    other_ranks: tuple[tuple[MemoryEntry, ...], ...] = ()  # the memory of ranks 1, 2, ...
    max_lens_tokens: int = 0  # the longest text of a LensRequest
    # Heads of each layer that an Ablation may name; empty if the model or its ranks take none.
    ablatable_heads: tuple[int, ...] = ()
    quantization: str | None = None  # int8, int4 or fp8, if linear weights are kept so
    kv_cache_dtype: str | None = None  # int8 or fp8, if keys and values are kept so
    weights: str = ""  # their identity: engine/checkpoint/identity.py
    speculative_model: str | None = None  # the name of the model that drafts tokens
    drafts_by_head: bool = False  # the model's own prediction head drafts tokens
    head_unused: str = ""  # why a prediction head that the checkpoint has, or names, does not
    max_loras: int = 0  # adapters in memory at once; 0: the model takes none
    compiled_kernels: int = 0  # of this CPU, which an earlier start had not left
    compile_seconds: float = 0.0  # not part of `load_seconds`
    # What follows a layer's name in the tensors of a quantised checkpoint, such as ".scales".
    weight_parts: tuple[str, ...] = ()
    num_labels: int = 0  # of an encoder with a head: texts become this many logits, no vectors
    # Optimisations of a GPU's kernels that are on (engine/kernels/triton/chips.py); None on a CPU.
    kernel_features: tuple[str, ...] | None = None

    @property
    def tensor_parallel_size(self) -> int:
        """Number of processes that compute the model together."""
        return 1 + len(self.other_ranks)
