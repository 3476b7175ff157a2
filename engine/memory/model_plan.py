"""ModelPlan: every choice about serving a model, made before its weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch import nn

from engine.attention.backend import AttentionBackend
from engine.attention.kv_cache import block_bytes, group_layers
from engine.attention.select import select_backend
from engine.attention.weights_size import lens_bytes
from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.folder import model_folder, read_config
from engine.checkpoint.image_processor import with_image_processor
from engine.checkpoint.loader import stored_codes
from engine.checkpoint.logit_score import read_logit_score
from engine.checkpoint.quantized.formats import storage_format
from engine.checkpoint.tensors import CheckpointTensor, checkpoint_tensors
from engine.checkpoint.weight_map import WeightMap
from engine.config import EngineConfig
from engine.device.facts import (
    available_memory,
    forbid_amx,
    onednn_has_matmul,
    select_device,
    select_dtype,
    sum_in_fp32,
    total_memory,
)
from engine.device.limits import cpu_count, is_memory_limited, machine_memory
from engine.device.ranks import Ranks
from engine.device.topology import device_of_rank
from engine.errors import ConfigError
from engine.layers.attention import Attention, kv_specs
from engine.layers.divide import divide
from engine.layers.embedding import LMHead
from engine.layers.linear import Linear
from engine.layers.pooler import Pooler
from engine.layers.state import state_specs
from engine.layers.weights.pack import has_kernel, keeps_stored_codes
from engine.memory import estimate
from engine.memory.adapter_plan import plan_adapters
from engine.memory.batch_invariance import check_variance, keeps_order, multiplies_in_tiles
from engine.memory.check_kernels import check_kernels
from engine.memory.check_ranks import check_groups, check_ranks
from engine.memory.draft_plan import plan_draft
from engine.memory.graph_shapes import GraphShape, mixed_shapes
from engine.memory.head_plan import plan_head
from engine.memory.kv_budget import (
    SHARE_OF_CONTAINER,
    SHARE_OF_MACHINE,
    check_weights,
    plan_blocks,
    spare_for_kv,
)
from engine.memory.pooler_plan import plan_pooler, pooler_numbers
from engine.memory.state_plan import default_budget, plan_states
from engine.memory.token_limits import default_budgets, max_model_len
from engine.memory.trunk_plan import (
    TrunkPlan,
    check_trunk,
    drop_head,
    is_trunk,
    plan_trunk,
    trunk_weight_map,
)
from engine.models.base import (
    Classifier,
    Model,
    classifier_of,
    image_encoder,
    on_meta_device,
    whole_image_tokens,
)
from engine.models.logit_score import LogitScore
from engine.models.registry import model_class
from engine.ops.codes import Quantization
from engine.ops.kernels import select_kernels

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ATTENTION_SLOWNESS = 2.5  # of a multiplication on a CPU, relative to that in a linear layer


class ModelPlan:
    """A model on the meta device, and how it will be served.

    Raises ConfigError if it cannot be served as `config` requests.
    """

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        """Plan what the process number `rank` of the model's ranks serves."""
        self.config = config
        self.ranks = Ranks(rank, config.tensor_parallel_size)
        self.folder = model_folder(config.model)
        hf_config = with_image_processor(read_config(self.folder), self.folder)
        self.architecture, self.kind, build = model_class(hf_config)
        self.has_trunk = self.kind == "decoder" and is_trunk(config, self.folder, self.architecture)
        if self.has_trunk:  # of a decoder, which is served as an encoder
            self.kind = "encoder"
        self.storage = storage_format(hf_config)
        self._has_codes = self.storage is not None or any(self.folder.glob("*.gguf"))
        self.device = device_of_rank(select_device(config.device), self.ranks)
        if self.device.type == "cuda":
            sum_in_fp32()
        self.dtype = select_dtype(config.dtype, self.device)
        self.max_model_len = max_model_len(config, build.read_config(hf_config).max_positions)
        self.module = on_meta_device(build, hf_config, self.max_model_len, self.dtype)
        self.model = cast(Model, self.module)
        self._drop_head(hf_config)
        self._own_parameters = sum(p.numel() for p in self.module.parameters())
        check_ranks(self)
        divide(self.module, self.ranks)
        self._plan_texts(hf_config)
        self._select_attention()
        self.threads = config.threads or cpu_count()
        is_cpu = self.device.type == "cpu"
        if is_cpu:
            self.threads = max(self.threads // self.ranks.count, 1)
        self.batch_variance = check_variance(self)
        # Of a quantised checkpoint, so that loading need not read their names again.
        self.tensors: Mapping[str, CheckpointTensor] | None = None
        self.stored_kind = self._keep_stored_codes()
        check_kernels(self)
        check_groups(self)
        step_tokens, encoder_tokens = default_budgets(self.device)
        self.max_num_batched_tokens = config.max_num_batched_tokens or step_tokens
        # A step may exceed the configured budget by an image, which one step computes whole.
        self.image_tokens = whole_image_tokens(self.module)
        self.max_num_batched_tokens += self.image_tokens
        self.max_num_encoder_tokens = config.max_num_encoder_tokens or encoder_tokens
        self.prediction = plan_head(self)
        self._plan_caches()
        self._estimate_weights()
        self.step_bytes = estimate.step_bytes(self)
        self.program_bytes = estimate.program_bytes(self)
        self.adapters = plan_adapters(self)
        self.draft = plan_draft(self)
        if self.draft is not None:  # it runs between two steps
            self.step_bytes = max(self.step_bytes, self.draft.step_bytes)
            self.program_bytes += self.draft.program_bytes

    def _estimate_weights(self) -> None:
        """Estimate what the weights take: now, because loading replaces them."""
        self.rank_parameters = sum(p.numel() for m in self.modules for p in m.parameters())
        self.weight_bytes = estimate.weight_bytes(self)
        self.plain_bytes = estimate.plain_bytes(self)
        self.packed_bytes = estimate.packed_bytes(self)
        self.loading_bytes = estimate.loading_bytes(self)

    def _select_attention(self) -> None:
        """Choose the kernels of attention and of the layers around it."""
        layers = [layer for layer in self.module.modules() if isinstance(layer, Attention)]
        self.attention_specs = [layer.spec for layer in layers]
        # A lens needs all heads, so several ranks have none.
        sees = image_encoder(self.module) is not None
        self.lens_bytes = 0
        if self.ranks.count == 1:
            self.lens_bytes = lens_bytes(self.attention_specs, sees=sees)
        self.backend, self.attention_description = self._backend()
        self.kernels = select_kernels(self.device, self.backend.name)
        in_tiles = multiplies_in_tiles(self.dtype, self.kernels)
        if keeps_order(self.config.batch_invariant, in_tiles=in_tiles):
            forbid_amx()
            self.backend, _ = self._backend()  # it computes chunks itself now

    def _backend(self) -> tuple[AttentionBackend, str]:
        wanted = self.config.attention_backend
        return select_backend(self.attention_specs, self.dtype, self.device, wanted)

    def _drop_head(self, hf_config: dict[str, Any]) -> None:
        """Remove what a decoder's trunk does not need."""
        self._head_tensors: tuple[str, ...] = ()
        self.head: Classifier | None = classifier_of(self.model)
        if self.has_trunk:
            check_trunk(hf_config, self.module, self.config)
        logit_score = read_logit_score(self.folder, self.config.pooling)
        if self.has_trunk and self.head is None and logit_score is not None:
            self.head = LogitScore(self.model, logit_score)
        elif self.has_trunk:
            self._head_tensors = drop_head(self.module, self.model)

    def weight_map(self) -> WeightMap:
        """Return the map of the tensors that are loaded."""
        if not self.has_trunk:
            return self.model.weight_map()
        return trunk_weight_map(self.model.weight_map(), self._head_tensors)

    def _plan_texts(self, hf_config: dict[str, Any]) -> None:
        """Plan what becomes of an encoder's texts: vectors, or the source of an answer."""
        self.pooler: Pooler | None = None
        if self.kind == "encoder":
            self.pooler = plan_pooler(self.model, self.head, self.folder, self.config)
        elif self.config.pooling is not None:
            raise ConfigError(
                f"--pooling {self.config.pooling} is not possible: {self.architecture} makes no "
                "vectors. Leave the flag out."
            )
        self.start_token: int | None = None
        if self.kind == "encoder-decoder":
            self.start_token = _start_token(self.folder, hf_config, self.model.config.vocab_size)

    def _plan_states(self) -> None:
        """Plan the states of recurrent layers; with little memory fewer sequences run at once."""
        self.state_specs = state_specs(self.module)
        config, budget = self.config, self.config.state_memory_bytes
        total, machine = total_memory(self.device), self.of_rank(machine_memory())
        share = machine // (SHARE_OF_CONTAINER if is_memory_limited() else SHARE_OF_MACHINE)
        most = config.num_gpu_blocks_override
        if most is None:
            size = config.kv_cache_memory_bytes or total or share
            most = size // max(self.block_bytes, 1)
            if total is None and config.kv_cache_memory_bytes is None:  # as `plan_blocks`
                blocks = -(-self.max_model_len // config.block_size)
                most = min(most, config.max_num_seqs * blocks)
        if budget is None:
            budget = default_budget(total, share, config)
        self.states = plan_states(
            self.state_specs,
            self.dtype,
            config,
            most_snapshots=most,  # a snapshot without its KV block is of no use
            budget=budget,
        )
        self.config = replace(self.config, max_num_seqs=self.states.max_num_seqs)

    def _plan_caches(self) -> None:
        config = self.config
        self.kv_specs = [] if self.has_trunk else kv_specs(*self.modules)
        self.trunk: TrunkPlan | None = None
        if self.has_trunk:
            tokens = max(self.max_num_encoder_tokens, self.max_model_len)
            self.trunk = plan_trunk(self.module, config, self.dtype, step_tokens=tokens)
        self.kv_groups = group_layers(self.kv_specs).groups
        if config.kv_cache_dtype != "auto" and not self.kv_groups:
            raise ConfigError(
                f"--kv-cache-dtype {config.kv_cache_dtype} is not possible: {self.architecture} is "
                "an encoder and has no KV cache."
            )
        self.kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, self.dtype)
        self.block_bytes = block_bytes(self.kv_specs, config.block_size, self.kv_dtype)
        self._plan_states()

    @property
    def modules(self) -> list[nn.Module]:
        """The model, and its prediction head if that drafts."""
        return (
            [self.module]
            if self.prediction.module is None
            else [self.module, self.prediction.module]
        )

    @property
    def num_parameters(self) -> int:
        """The number of parameters, with those of the modules behind the pooling."""
        return self._own_parameters + pooler_numbers(self.pooler)

    @property
    def prepacks(self) -> bool:
        """Whether linear weights will be kept in oneDNN's packed layout."""
        return self.config.prepack and self.can_pack

    @property
    def can_pack(self) -> bool:
        """Whether oneDNN can multiply packed weights here."""
        return onednn_has_matmul(self.device, self.dtype)

    @property
    def rounds_to(self) -> Quantization | None:
        """How linear weights will be rounded while loading."""
        return None if self.config.quantization == "none" else self.config.quantization

    @property
    def quantization(self) -> str | None:
        """How linear weights will be kept quantised; None if they are plain, or only rounded."""
        kind = self.rounds_to
        if kind is not None and has_kernel(kind, self.dtype, self.kernels):
            return kind
        return self.stored_kind

    def _keep_stored_codes(self) -> str | None:
        """Let layers keep the codes of a quantised checkpoint if a kernel multiplies them.

        Returns the commonest kind of codes that are kept, None if none are.
        """
        is_dummy = self.config.load_format == "dummy"
        if self.config.quantization or is_dummy or not self._has_codes or not self.prepacks:
            return None
        if not keeps_stored_codes(self.dtype, self.kernels):
            return None
        self.tensors = checkpoint_tensors(self.folder)
        stored = stored_codes(self.weight_map(), self.folder, self.tensors)
        names = {module: name for name, module in self.module.named_modules()}
        keeps_codes = False
        for layer in names:
            if isinstance(layer, Linear | LMHead):
                tied = layer.tied_to if isinstance(layer, LMHead) else None
                form = stored.forms.get(f"{names[tied or layer]}.weight")
                layer.tensors.keep_codes(form)
                keeps_codes = keeps_codes or form is not None
        return stored.kind if keeps_codes else None

    @property
    def packs(self) -> bool:
        """Whether linear weights will be packed; on a GPU, only those that are quantised."""
        return self.prepacks or (self.kernels == "triton" and self.rounds_to is not None)

    @property
    def context_cost(self) -> float:
        """The cost of a prompt token for each token of its context; all other costs are 1.

        0 on a GPU, where steps with a chunk are short.
        """
        if self.device.type != "cpu":
            return 0.0
        causal = [s for s in self.attention_specs if s.kind == "causal" and s.window is None]
        attended = 2 * sum(spec.num_heads * spec.head_dim for spec in causal)
        return ATTENTION_SLOWNESS * attended / self.rank_parameters

    @property
    def captures_graphs(self) -> bool:
        """Whether steps will be CUDA graphs."""
        is_eager = self.config.enforce_eager or self.kind == "encoder"
        return self.device.type == "cuda" and self.backend.supports_capture and not is_eager

    @property
    def mixed_graph_shapes(self) -> list[GraphShape]:
        """The captured shapes with prompt chunks, the largest last.

        Empty if the encoder's pass and the decoder's share a step, as both read prompts.
        """
        if any(group.is_cross for group in self.kv_groups):
            return []
        return mixed_shapes(self.config.max_num_seqs, self.max_num_batched_tokens)

    def of_rank(self, memory: int) -> int:
        """Return a rank's part of the device's memory: on a CPU, ranks share the machine's."""
        return memory // self.ranks.count if self.device.type == "cpu" else memory

    def check_weights(self) -> None:
        """Raises ConfigError if the device cannot hold the weights while they are loaded."""
        total = total_memory(self.device)
        free = self.of_rank(machine_memory()) if total is None else available_memory(self.device)
        needed = self.loading_bytes
        if self.draft is not None:
            needed += self.draft.loading_bytes
        check_weights(needed, free, total)

    def plan_blocks(self, free: int, reserved: int = 0) -> tuple[int, int]:
        """Return (usable KV blocks, longest sequence in tokens).

        Of `free` bytes, `reserved` are needed for something else.
        """
        total = total_memory(self.device)
        if total is not None:
            reserved += self.block_bytes  # the null block
        return plan_blocks(
            self.config,
            self.kv_groups,
            self.block_bytes,
            max_model_len=self.max_model_len,
            step_tokens=self.max_num_batched_tokens,
            spare=spare_for_kv(self.config, free, total, reserved, is_limited=is_memory_limited()),
            # The page cache holds much of a machine's memory and gives it back on demand.
            most=self.of_rank(machine_memory()) if total is None else free,
            fill=total is not None,
        )


def _start_token(folder: Path, hf_config: dict[str, Any], vocab_size: int) -> int:
    """Return the token that an encoder–decoder's answer begins with.

    It stands in config.json or generation_config.json; otherwise it is the padding token.
    """
    key = "decoder_start_token_id"
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    candidates = (hf_config.get(key), generation.get(key), hf_config.get("pad_token_id"))
    token = next((token for token in candidates if token is not None), None)
    if type(token) is not int or not 0 <= token < vocab_size:
        raise ConfigError(
            f"config.json has {key} = {token!r}; this model needs one below {vocab_size}."
        )
    return token
