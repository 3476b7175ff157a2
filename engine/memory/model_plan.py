"""Blueprint: what is decided about a model before its weights are read, and what it will take."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from engine.attention.kv_cache import block_bytes, group_layers
from engine.attention.select import select_backend
from engine.attention.torch.batching import MAX_SCORES, SPLIT
from engine.checkpoint.folder import model_folder, read_json
from engine.config import MAX_TOKENS, EngineConfig
from engine.device.facts import (
    available_memory,
    onednn_has_matmul,
    select_device,
    select_dtype,
    total_memory,
)
from engine.device.limits import machine_memory
from engine.errors import ConfigError
from engine.layers.attention import Attention, kv_specs
from engine.layers.embedding import LMHead
from engine.layers.linear import Linear
from engine.memory.kv_budget import MemoryPlan, check_weights, margin, plan_blocks, spare_for_kv
from engine.models.base import Model
from engine.models.registry import model_class
from engine.ops.kernels import Kernels
from engine.runner.graphs import batch_sizes
from engine.runner.mixed import mixed_shapes
from engine.runner.sequence_rows import SequenceRows

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 256, 2048
ENDLESS_TOKENS = 512  # served of a context without an end, unless more is asked for
CPU_ENCODER_TOKENS, GPU_ENCODER_TOKENS = 1024, 16384
GRAPH_BYTES = 4 << 20  # that CUDA keeps for a recording of some hundred kernels; a guess


class ModelPlan:
    """A model on the meta device and how it is to be served.

    Raises ConfigError where it cannot be served as `config` asks.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.folder = model_folder(config.model)
        hf_config = read_json(self.folder / "config.json")
        self.architecture, self.kind, build = model_class(hf_config)
        self.device = select_device(config.device)
        self.dtype = select_dtype(config.dtype, self.device)
        self.max_model_len = _max_model_len(config, build.read_config(hf_config).max_positions)
        try:
            with torch.device("meta"):
                module = build(hf_config, max_positions=self.max_model_len, dtype=self.dtype)
        except RuntimeError as error:  # more bytes than there are, or than torch can count
            raise ConfigError(f"config.json has sizes that cannot be laid out: {error}") from error
        self.module: nn.Module = module
        self.model = cast(Model, module)
        self.parameters = sum(p.numel() for p in module.parameters())
        self.start_token: int | None = None
        if self.kind == "encoder-decoder":
            self.start_token = _start_token(self.folder, hf_config, self.model.config.vocab_size)
        self.attentions = [a.spec for a in module.modules() if isinstance(a, Attention)]
        self.backend, self.attention = select_backend(
            self.attentions, self.dtype, self.device, config.attention_backend
        )
        on_cpu = self.device.type == "cpu"
        self.max_num_batched_tokens = config.max_num_batched_tokens or (
            CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS
        )
        self.max_num_encoder_tokens = config.max_num_encoder_tokens or (
            CPU_ENCODER_TOKENS if on_cpu else GPU_ENCODER_TOKENS
        )
        self.specs = kv_specs(module)
        self.groups = group_layers(self.specs).groups
        self.block_bytes = block_bytes(self.specs, config.block_size, self.dtype)
        tables = sum(buffer.nbytes for buffer in module.buffers())
        # Of parameters in the served dtype, and of the tables made beside them.
        self.weight_bytes = self.parameters * self.dtype.itemsize + tables
        self.packed_bytes, self._kept_bytes = self._packed_bytes()
        self.step_bytes = self._step_bytes()

    def check_weights(self) -> None:
        """Raises ConfigError where the device cannot hold them."""
        total = total_memory(self.device)
        free = machine_memory() if total is None else available_memory(self.device)
        check_weights(self.weight_bytes + self._kept_bytes, free, total)

    def plan_blocks(self, free: int, reserved: int = 0) -> tuple[int, int]:
        """(usable KV blocks, longest sequence in tokens) where of `free` bytes `reserved` ones are
        needed for something else."""
        total = total_memory(self.device)
        if total is not None:
            reserved += self.block_bytes  # the null block
        return plan_blocks(
            self.config,
            self.groups,
            self.block_bytes,
            max_model_len=self.max_model_len,
            step_tokens=self.max_num_batched_tokens,
            spare=spare_for_kv(self.config, free, total, reserved),
            # Much of a machine's memory is only lent to files, so what is free would be too strict.
            most=machine_memory() if total is None else free,
            fill=total is not None,
        )

    def rows(
        self, max_model_len: int, device: torch.device, kernels: Kernels = "torch"
    ) -> SequenceRows:
        """What the device knows of running sequences of up to `max_model_len` tokens."""
        config = self.config
        return SequenceRows(
            config.max_num_seqs,
            max_model_len,
            config.block_size,
            len(self.groups),
            device,
            kernels,
        )

    def _step_bytes(self) -> int:
        """What the largest step holds at its worst moment, besides weights and KV.

        The widest linear over all tokens, or one layer's attention at full length, or the logits of
        all sequences: as computed, scaled, and as probabilities in two orders.
        """
        size, longest, steps = self.dtype.itemsize, self.max_model_len, self.max_num_batched_tokens
        texts = self._text_tokens
        linears = [m.weight for m in self.module.modules() if isinstance(m, Linear)]
        widths = [sum(weight.shape) for weight in linears if weight is not None]
        layer = 2 * self._most_tokens * max(widths, default=0) * size
        scores = 0
        if self.backend.name == "torch":  # it writes them out, and weights
            scores = max(
                spec.num_heads
                * (self._text_scores(texts) if spec.kind == "full" else steps * longest)
                for spec in self.attentions
            )
        samples = 0 if self.kind == "encoder" else min(self.config.max_num_seqs, steps)
        logits = samples * self.model.config.vocab_size * 6 * 4
        return max(layer, scores * (2 * size + 4), logits)

    @property
    def _text_tokens(self) -> int:
        """Most tokens of texts in a step: one longer than the budget goes alone."""
        return max(self.max_num_encoder_tokens, self.max_model_len)

    @property
    def _most_tokens(self) -> int:
        """Most tokens that pass a layer at once."""
        steps, texts = self.max_num_batched_tokens, self._text_tokens
        return {"decoder": steps, "encoder": texts}.get(self.kind, max(steps, texts))

    def _text_scores(self, tokens: int) -> int:
        """Of one head, for the largest group of so many tokens of texts."""
        keys = -(-self.max_model_len // SPLIT) * SPLIT
        return min(tokens * keys, max(self.max_model_len * keys, tokens * SPLIT, MAX_SCORES))

    def memory_plan(self) -> MemoryPlan:
        """Predicted from shapes alone, with what is free now. Raises ConfigError where it cannot
        be."""
        self.check_weights()
        available = available_memory(self.device)
        before = self.taken(0, self.max_model_len)
        before.pop("margin", None)  # which is no less for what has been taken
        blocks, length = self.plan_blocks(available, sum(before.values()))
        return MemoryPlan(self.taken(blocks, length), available, blocks, length)

    def taken(self, blocks: int, length: int) -> dict[str, int]:
        """Bytes by what takes them, with `blocks` KV blocks and sequences of up to `length`."""
        taken = {"weights": self.weight_bytes - self.packed_bytes + self._kept_bytes}
        if self.packed_bytes:
            taken["packed weights"] = self.packed_bytes
        taken["rows"] = self.rows(length, torch.device("meta")).num_bytes
        if self.captures:
            taken["graphs"] = self._graph_bytes()
        taken["largest step"] = self.step_bytes
        taken["KV cache"] = (blocks + 1) * self.block_bytes if self.groups else 0
        if total := total_memory(self.device):
            taken["margin"] = margin(self.config, total)
        return taken

    @property
    def captures(self) -> bool:
        """Whether steps will be CUDA graphs."""
        eager = self.config.enforce_eager or self.kind == "encoder"
        return self.device.type == "cuda" and self.backend.captures and not eager

    @property
    def packs(self) -> bool:
        """Whether linear weights will be oneDNN's."""
        return self.config.prepack and onednn_has_matmul(self.device, self.dtype)

    def _packed_bytes(self) -> tuple[int, int]:
        """(bytes of packed weights, those of them that an embedding keeps unpacked as well)."""
        if not self.packs:
            return 0, 0
        modules, size = list(self.module.modules()), self.dtype.itemsize
        linears = [m.weight for m in modules if isinstance(m, Linear)]
        heads = [m for m in modules if isinstance(m, LMHead)]
        packed = sum(weight.numel() for weight in linears if weight is not None)
        packed += sum(head.table.numel() for head in heads)
        kept = sum(head.table.numel() for head in heads if head.weight is None)
        return packed * size, kept * size

    def _graph_bytes(self) -> int:
        """Buffers of the largest size, what a step of it holds, and what the driver keeps."""
        sizes, shapes = batch_sizes(self.config.max_num_seqs), []
        logits = sizes[-1] * self.model.config.vocab_size * 4
        tokens = sizes[-1]
        if not any(group.is_cross for group in self.groups):
            shapes = mixed_shapes(self.config.max_num_seqs, self.max_num_batched_tokens)
            tokens = max(tokens, sum(shapes[-1]))
        step = self.step_bytes * tokens // self._most_tokens
        return 3 * logits + step + (2 * len(sizes) + len(shapes)) * GRAPH_BYTES


def _max_model_len(config: EngineConfig, own: int | None) -> int:
    """The context served: what was asked for, within what the model was made for."""
    if own is None:
        return config.max_model_len or ENDLESS_TOKENS
    if config.max_model_len is not None and config.max_model_len > own:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {own} positions this model "
            f"was made for. Use --max-model-len {own} or less."
        )
    if config.max_model_len is None and own > MAX_TOKENS:
        raise ConfigError(
            f"config.json has {own} positions; say with --max-model-len how many of them to serve, "
            f"at most {MAX_TOKENS}."
        )
    return config.max_model_len or own


def _start_token(folder: Path, hf_config: dict[str, Any], vocab_size: int) -> int:
    """The token an encoder–decoder's answer begins with: said in one of two files, or padding."""
    path, key = folder / "generation_config.json", "decoder_start_token_id"
    generation = read_json(path) if path.is_file() else {}
    said = hf_config.get(key), generation.get(key), hf_config.get("pad_token_id")
    token = next((token for token in said if token is not None), None)
    if type(token) is not int or not 0 <= token < vocab_size:
        raise ConfigError(
            f"config.json has {key} = {token!r}; this model needs one below {vocab_size}."
        )
    return token
