"""ModelRunner: owns the model, the KV cache and the rows; computes steps. Knows no architecture."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from engine.attention.backend import AttentionBackend
from engine.attention.kv_cache import KVCache, block_bytes, group_layers
from engine.attention.selection import select_backend
from engine.config import EngineConfig, model_folder, read_json
from engine.errors import ConfigError
from engine.layers.linear import can_prepack
from engine.memory import plan_blocks
from engine.models.base import Model
from engine.models.registry import model_class
from engine.platform import available_memory, cpu_count, select_device, select_dtype, to_device
from engine.protocol import EmbedOutput, Progress, Ready, SamplingParams, TokenLogprobs
from engine.runner.batch import build_batch
from engine.runner.encode import build_encoder_batch, pooled
from engine.runner.rows import SequenceRows
from engine.sampling.sampler import sample
from engine.scheduling.step import Encode, NewBlocks, NewRow, SampledToken, ScheduledSlice, Step
from engine.weights.dummy import random_weights
from engine.weights.loader import load_weights

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 256, 2048
ENDLESS_TOKENS = 512  # served of a context without an end, unless more is asked for
CPU_ENCODER_TOKENS, GPU_ENCODER_TOKENS = 1024, 16384


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step whose tokens may not be on the host yet."""

    step: Step
    tokens: torch.Tensor  # [samples] int64
    logprobs: list[TokenLogprobs | None]
    launched_at: float  # CLOCK_MONOTONIC
    vectors: torch.Tensor | None = None  # [texts to embed, hidden] fp32

    def wait(self) -> list[SampledToken]:
        """The single point of synchronisation: one SampledToken per sampling slice."""
        return [
            SampledToken(token, logprobs)
            for token, logprobs in zip(self.tokens.tolist(), self.logprobs, strict=True)
        ]

    def embeddings(self) -> list[EmbedOutput]:
        """The vectors of the step's texts; waits like `wait`."""
        if self.vectors is None:
            return []
        ids = [encode.id for encode in self.step.encodes if encode.pooling]
        return [
            EmbedOutput(i, v.tobytes(), "stop" if np.isfinite(v).all() else "error")
            for i, v in zip(ids, self.vectors.cpu().numpy(), strict=True)
        ]


class ModelRunner:
    """A loaded model, ready to compute steps. Raises ConfigError where it cannot be served."""

    def __init__(
        self, config: EngineConfig, progress: Callable[[Progress], None] = lambda p: None
    ) -> None:
        began = time.monotonic()
        folder = model_folder(config.model)
        hf_config = read_json(folder / "config.json")
        self.architecture, self.kind, build = model_class(hf_config)
        self.device = select_device(config.device)
        self.dtype = select_dtype(config.dtype, self.device)
        self.threads = config.threads or cpu_count()
        torch.set_num_threads(self.threads)
        max_model_len = _max_model_len(config, build.read_config(hf_config).max_positions)
        with torch.device("meta"):
            module: nn.Module = build(hf_config, max_positions=max_model_len, dtype=self.dtype)
        self.model = cast(Model, module)
        self.start_token: int | None = None
        if self.kind == "encoder-decoder":
            self.start_token = _start_token(folder, hf_config, self.model.vocab_size)
        self.backend: AttentionBackend = select_backend(self.model.specs, self.dtype)
        if config.load_format == "dummy":
            self.weight_bytes = random_weights(module, dtype=self.dtype, device=self.device)
        else:
            self.weight_bytes = load_weights(
                module,
                self.model.weight_map(),
                folder,
                dtype=self.dtype,
                device=self.device,
                progress=lambda fraction: progress(Progress("loading weights", fraction)),
            )
        self.parameters = sum(p.numel() for p in module.parameters())
        if config.prepack and can_prepack(self.device):
            progress(Progress("prepacking weights", 0.0))
            _prepack(module)
        per_block = block_bytes(self.model.specs, config.block_size, self.dtype)
        self.max_num_batched_tokens = config.max_num_batched_tokens or (
            CPU_STEP_TOKENS if self.device.type == "cpu" else GPU_STEP_TOKENS
        )
        self.max_num_encoder_tokens = config.max_num_encoder_tokens or (
            CPU_ENCODER_TOKENS if self.device.type == "cpu" else GPU_ENCODER_TOKENS
        )
        groups = group_layers(self.model.specs).groups
        blocks, self.max_model_len = plan_blocks(
            config,
            groups,
            per_block,
            max_model_len=max_model_len,
            step_tokens=self.max_num_batched_tokens,
            available=available_memory(self.device),
        )
        progress(Progress("allocating the KV cache", 0.0))
        self.kv = KVCache(self.model.specs, blocks, config.block_size, self.dtype, self.device)
        self.rows = SequenceRows(
            config.max_num_seqs, self.max_model_len, config.block_size, len(groups), self.device
        )
        self.config = config
        progress(Progress("warming up", 0.0))
        self.embedding_size = self._warm_up()
        self.load_seconds = time.monotonic() - began

    @torch.inference_mode()
    def launch(self, step: Step) -> PendingStep:
        """Compute one step: write rows and blocks, run the model, sample, append the tokens."""
        launched_at = time.monotonic()
        if step.scrub:
            self.kv.scrub(step.scrub)
        self.rows.apply(step.new_rows, step.new_blocks)
        vectors = self._encode(step.encodes) if step.encodes else None
        if not step.slices:
            return PendingStep(step, torch.empty(0), [], launched_at, vectors)
        batch = build_batch(step, self.rows, self.kv, self.backend)
        hidden = self.model.forward(batch)
        sampling = [s for s in step.slices if s.samples]
        if not sampling:
            return PendingStep(step, torch.empty(0), [], launched_at, vectors)
        logits = self.model.logits(hidden.index_select(0, batch.logit_index))
        ends = [s.start + s.count for s in sampling]
        sampled, logprobs = sample(
            logits,
            [self.rows.sampling_row(s.row, end) for s, end in zip(sampling, ends, strict=True)],
        )
        (row_ids,) = to_device([[s.row for s in sampling]], self.device)
        self.rows.append(row_ids, sampled)
        return PendingStep(step, sampled, logprobs, launched_at, vectors)

    def _encode(self, encodes: Sequence[Encode]) -> torch.Tensor | None:
        """Sources, whose KV is written, and texts, whose vectors are returned."""
        batch = build_encoder_batch(encodes, self.kv, self.backend, self.device)
        hidden = self.model.encode(batch)
        return pooled(hidden, encodes) if encodes[0].pooling else None

    def _warm_up(self) -> int:
        """One token through everything, so that the first request pays for nothing but itself.

        Returns the length of an encoder's vectors.
        """
        if self.kind == "encoder":
            step = Step(0, (), (), (), (), (Encode(0, (0,), "mean"),))
            (output,) = self.launch(step).embeddings()
            return len(output.vector) // 4  # fp32
        row = NewRow(0, (0,), 1, SamplingParams(max_tokens=1, temperature=1.0), source_length=1)
        slice_ = ScheduledSlice(id=0, epoch=0, row=0, start=0, count=1, samples=True)
        blocks = tuple(NewBlocks(0, group, 0, (1,)) for group in range(len(self.kv.groups)))
        source = tuple((n, (1,)) for n, group in enumerate(self.kv.groups) if group.cross)
        encodes = (Encode(0, (0,), blocks=source),) if source else ()
        self.launch(Step(0, (slice_,), (row,), blocks, (), encodes)).wait()
        self.kv.scrub([1])
        return 0

    def facts(self) -> Ready:
        """What the server and its users are told."""
        return Ready(
            architecture=self.architecture,
            kind=self.kind,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            vocab_size=self.model.vocab_size,
            max_model_len=self.max_model_len,
            block_size=self.kv.block_size,
            num_blocks=self.kv.num_blocks,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            parameters=self.parameters,
            weight_bytes=self.weight_bytes,
            kv_cache_bytes=self.kv.num_bytes,
            load_seconds=self.load_seconds,
            attention_backend=self.backend.name,
            threads=self.threads,
            kv_groups=self.kv.groups,
            start_token=self.start_token,
            embedding_size=self.embedding_size,
        )


def _max_model_len(config: EngineConfig, own: int | None) -> int:
    """The context served: what was asked for, within what the model was made for."""
    if own is None:
        return config.max_model_len or ENDLESS_TOKENS
    if config.max_model_len is not None and config.max_model_len > own:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {own} positions this model "
            f"was made for. Use --max-model-len {own} or less."
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


def _prepack(model: nn.Module) -> None:
    for module in model.modules():
        if callable(prepack := getattr(module, "prepack", None)):
            prepack()
