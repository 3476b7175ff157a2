"""EngineConfig: every setting of the engine, declared once.

Flags, environment variables, YAML keys, validation and the flags table in the docs all come from
these fields. engine/memory/model_plan.py chooses the value of a field left at None, without
changing this object, and the choice is printed at start.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

DEMO_MODEL = "demo"


# Panels of --help and of docs/flags.md.
MODEL = "Model"
SCHEDULING = "KV cache and scheduling"

Count = Annotated[int, Meta(ge=1)]
Threads = Annotated[int, Meta(ge=1, le=1024)]  # OpenMP crashes with tens of thousands
Seconds = Annotated[float, Meta(gt=0.0)]
Size = Annotated[int, Meta(ge=1, extra={"size": True})]  # may be written as 32k or 2GiB
# Upper limit for the tokens of a step or of a sequence.
MAX_TOKENS = 2**24  # fp32 cannot represent every larger position
Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS, extra={"size": True})]


ADAPTER = r"^[^=\s,]+=\S.*\Z"  # NAME=PATH
KVCacheDtype = Literal["auto", "int8", "fp8"]
# Those of sentence-transformers; `last` is short for `lasttoken`. `logit_score` scores pairs.
Pooling = Literal[
    "cls",
    "max",
    "mean",
    "mean_sqrt_len_tokens",
    "weightedmean",
    "lasttoken",
    "last",
    "logit_score",
]


def setting(panel: str, text: str, **more: Any) -> Meta:
    """Return a field's help panel and text; `more` takes further arguments of msgspec.Meta."""
    return Meta(title=panel, description=text, **more)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model to load and how to run it. Sizes are in tokens, blocks or bytes, as stated."""

    model: Annotated[
        str,
        setting(
            MODEL,
            "A Hugging Face model folder, ORG/NAME on huggingface.co (cached or downloaded), "
            "or the built-in models `demo`, `demo-translate` and `demo-vision`.",
        ),
    ] = DEMO_MODEL
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        setting(
            MODEL, "Dtype of weights and computation; auto: bfloat16 if the device supports it."
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], setting(MODEL, "auto uses a GPU if there is one.")
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "torch", "triton", "numba"],
        setting(
            MODEL,
            "Kernels of attention and other operations. auto: Triton's on a GPU, Numba's on a "
            "CPU, and torch's where those do not fit.",
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "plain"],
        setting(
            MODEL,
            "Optimisations of GPU kernels. auto: those measured on this GPU. plain: none, for bug "
            "reports.",
        ),
    ] = "auto"
    batch_invariant: Annotated[
        Literal["auto", "on", "off"],
        setting(
            MODEL,
            "Whether the bits of a request's logits are independent of other requests. auto: "
            "on CPUs, unless only oneDNN can use their AMX. on: always, or refuse to start. off: "
            "no promise.",
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["safetensors", "dummy"],
        setting(MODEL, "dummy: random weights, for benchmarks; needs only config.json."),
    ] = "safetensors"
    max_model_len: Annotated[
        Tokens | None,
        setting(MODEL, "Most tokens of prompt plus answer; default: the model's own limit."),
    ] = None
    threads: Annotated[
        Threads | None,
        setting(MODEL, "CPU threads of the engine; default: all."),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        setting(
            MODEL,
            "Processes that share the model: every layer's weights, the KV cache and the threads.",
            ge=1,
            le=64,
        ),
    ] = 1
    prepack: Annotated[bool, setting(MODEL, "Prepack linear weights for oneDNN on a CPU.")] = True
    quantization: Annotated[
        Literal["int8", "int4", "fp8", "none"] | None,
        setting(
            MODEL,
            "Round linear weights while loading. int8 and int4 have a scale for every 32 inputs, "
            "int4 also an offset; fp8 (e4m3) has one for every 128. The head has int8. Default: "
            "none, but a CPU with a kernel for them keeps the codes of quantised checkpoints.",
        ),
    ] = None
    speculation: Annotated[
        Literal["auto", "mtp", "ngram", "off"],
        setting(
            MODEL,
            "Draft tokens, for up to 4 streams. ngram: repeated text. "
            "mtp: the checkpoint's prediction head. auto: mtp if it is cheap, else ngram. Answers "
            "stay the same.",
        ),
    ] = "auto"
    speculative_model: Annotated[
        str | None,
        setting(
            MODEL,
            "A smaller model with the same tokenizer that drafts. Answers stay the same.",
        ),
    ] = None
    pooling: Annotated[
        Pooling | None,
        setting(
            MODEL,
            "Pooling of texts, also of decoders, in place of the checkpoint's.",
        ),
    ] = None
    lora_modules: Annotated[
        tuple[Annotated[str, Meta(pattern=ADAPTER)], ...],
        setting(
            MODEL,
            "LoRA adapters, each as NAME=PATH of a PEFT folder. Clients name one in `model`.",
            extra={"form": "a list of NAME=PATH"},
        ),
    ] = ()
    max_loras: Annotated[
        Count | None,
        setting(
            MODEL,
            "Most adapters in memory; the least recently used leaves. Default: 8 with "
            "--lora-modules, else none, and none can be loaded later.",
        ),
    ] = None
    max_lora_rank: Annotated[
        Count | None,
        setting(
            MODEL,
            "Largest rank of an adapter. Default: the largest of --lora-modules, at least 16.",
        ),
    ] = None
    enforce_eager: Annotated[bool, setting(MODEL, "Launch kernels without CUDA graphs.")] = False
    max_num_seqs: Annotated[
        int, setting(SCHEDULING, "Most sequences in one step.", ge=1, le=4096)
    ] = 128
    max_num_batched_tokens: Annotated[
        Tokens | None,
        setting(SCHEDULING, "Token budget of one step; default: 256 on a CPU, 2048 on a GPU."),
    ] = None
    max_num_encoder_tokens: Annotated[
        Tokens | None,
        setting(
            SCHEDULING,
            "Encoder token budget of one step; a text above it is encoded alone. Default: 512 on "
            "a CPU, 16384 on a GPU.",
        ),
    ] = None
    block_size: Annotated[
        Literal[16, 32, 64, 128], setting(SCHEDULING, "Tokens in one KV block.")
    ] = 64
    gpu_memory_utilization: Annotated[
        float,
        setting(
            SCHEDULING,
            "Share of a GPU's memory to use; the KV cache gets the rest.",
            gt=0,
            le=1,
        ),
    ] = 0.9
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        setting(
            SCHEDULING,
            "Dtype of the cache; int8 and fp8 (e4m3) have scales per token and head. auto: that of "
            "--dtype.",
        ),
    ] = "auto"
    kv_cache_memory_bytes: Annotated[
        Size | None,
        setting(
            SCHEDULING,
            "Bytes for the KV cache, in each process. Default on a "
            "GPU: the rest of --gpu-memory-utilization; on a CPU: enough for --max-num-seqs full "
            "sequences, at most an eighth of a machine's free memory or half of a container's.",
        ),
    ] = None
    state_memory_bytes: Annotated[
        Size | None,
        setting(
            SCHEDULING,
            "Bytes for the states of recurrent layers, in each process. Default: a quarter of a "
            "GPU or container, an eighth of a machine.",
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        Count | None,
        setting(SCHEDULING, "Number of KV blocks; overrides the size in bytes."),
    ] = None
    enable_prefix_caching: Annotated[
        bool, setting(SCHEDULING, "Reuse the KV of prompts with a common prefix.")
    ] = True
    kv_cache_dir: Annotated[
        str | None,
        setting(
            SCHEDULING,
            "Folder that keeps KV over restarts; as private as prompts.",
        ),
    ] = None
    kv_cache_dir_bytes: Annotated[
        Size,
        setting(
            SCHEDULING,
            "Most bytes of its files; the least recently used leave.",
        ),
    ] = 8 << 30
    max_num_queued_reqs: Annotated[
        Count, setting(SCHEDULING, "Most waiting requests; further ones get a 503.")
    ] = 512
    max_num_queued_tokens: Annotated[
        Size, setting(SCHEDULING, "Most waiting prompt tokens; further requests get a 503.")
    ] = 262144
    max_queue_wait: Annotated[
        Seconds | None,
        setting(
            SCHEDULING,
            "Longest expected wait in seconds; beyond it, requests get a 503 at once. "
            "Default: 0.5 s; 8 requests may always wait.",
        ),
    ] = None
    stall_timeout: Annotated[
        Seconds,
        setting(
            SCHEDULING,
            "Seconds without a message before an engine with work counts as hung. It is then "
            "killed, and the server exits with status 3.",
        ),
    ] = 120.0


class AdapterSource(NamedTuple):
    """An adapter of --lora-modules."""

    id: int  # from 1
    name: str
    path: str


def adapter_sources(config: EngineConfig) -> tuple[AdapterSource, ...]:
    """Return the adapters of --lora-modules, in their order."""
    pairs = [given.split("=", 1) for given in config.lora_modules]
    return tuple(AdapterSource(place, *pair) for place, pair in enumerate(pairs, 1))
