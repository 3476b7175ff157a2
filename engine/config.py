"""EngineConfig: every choice the engine takes, declared once.

Flags, environment names, the YAML keys, validation and the flags table in the docs all come from
these fields. A field left at None is decided at start (`resolve` in the engine, which never
changes this object) and the decision is printed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.errors import ConfigError

DEMO_MODEL = "demo"

# What the command line makes of a field: its panel in --help, sizes written as 32k or 2GiB.
MODEL: dict[str, Any] = {"panel": "Model"}
SCHEDULING: dict[str, Any] = {"panel": "KV cache and scheduling"}
SIZE: dict[str, Any] = {"size": True}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to load and how to run it; sizes in tokens, blocks or bytes as each field says."""

    model: Annotated[
        str,
        Meta(
            description="A Hugging Face model folder, or `demo` for the model in the package.",
            extra=MODEL,
        ),
    ] = DEMO_MODEL
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(
            description="Weights and KV cache; auto is bfloat16 where the device computes in it.",
            extra=MODEL,
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="auto takes a GPU where there is one.", extra=MODEL),
    ] = "auto"
    max_model_len: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Longest prompt plus answer, in tokens; default: the model's own.",
                extra=MODEL | SIZE,
            ),
        ]
        | None
    ) = None
    max_num_seqs: Annotated[
        int,
        Meta(ge=1, le=4096, description="Most sequences that run in one step.", extra=SCHEDULING),
    ] = 128
    max_num_batched_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Token budget of one step; default: 256 on a CPU, 2048 on a GPU.",
                extra=SCHEDULING | SIZE,
            ),
        ]
        | None
    ) = None
    max_num_encoder_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Token budget of an encoder's part of a step, whole texts; a longer "
                "text goes alone. Default: 1024 on a CPU, 16384 on a GPU.",
                extra=SCHEDULING | SIZE,
            ),
        ]
        | None
    ) = None
    block_size: Annotated[
        Literal[16, 32, 64, 128], Meta(description="Tokens in one KV block.", extra=SCHEDULING)
    ] = 64
    kv_cache_memory_bytes: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Bytes for the KV cache; default: what max_num_seqs sequences of "
                "full length need, at most a quarter of the free memory.",
                extra=SCHEDULING | SIZE,
            ),
        ]
        | None
    ) = None
    num_gpu_blocks_override: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Exact number of KV blocks, on any device; overrides the bytes.",
                extra=SCHEDULING,
            ),
        ]
        | None
    ) = None
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse the KV of prompts that begin alike.", extra=SCHEDULING)
    ] = True
    max_num_queued_reqs: Annotated[
        int,
        Meta(
            ge=1, description="Waiting requests beyond which new ones get a 503.", extra=SCHEDULING
        ),
    ] = 512
    max_num_queued_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Waiting prompt tokens beyond which new requests get a 503.",
            extra=SCHEDULING | SIZE,
        ),
    ] = 262144
    threads: (
        Annotated[
            int,
            Meta(ge=1, description="CPU threads of the engine; default: all cores.", extra=MODEL),
        ]
        | None
    ) = None
    prepack: Annotated[
        bool, Meta(description="Prepack linear weights for oneDNN on a CPU (faster).", extra=MODEL)
    ] = True


def model_folder(model: str) -> Path:
    """The folder `model` names; raises ConfigError where there is no config.json in it."""
    folder = Path(__file__).parent / "demo" / "model" if model == DEMO_MODEL else Path(model)
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(
            f"No model folder at {folder}. Give a folder with config.json and *.safetensors, "
            f"or `{DEMO_MODEL}`; nothing is downloaded by `serve`."
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json, so it is not a Hugging Face model folder.")
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises ConfigError naming the file where it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value
