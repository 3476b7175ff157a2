"""EngineConfig: every setting of the engine, declared once.

Flags, environment variables, YAML keys, validation and the flags table in the docs all come from
these fields. engine/runner/blueprint.py chooses the value of a field left at None, without changing
this object, and the choice is printed at start.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.errors import ConfigError

# Names in /proc/cpuinfo of the instructions that multiply bfloat16, on x86 and on Arm.
BF16_CPU_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
DEMO_MODEL = "demo"
DEMO_FOLDERS = {DEMO_MODEL: "model", "demo-translate": "translate"}  # in engine/demo

# Checkpoint files that are read besides the weights, as fnmatch patterns. `pull` downloads them and
# `merge` copies them. They never include code or pickles.
CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",  # this and the following: pooling settings of sentence-transformers
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
)
WEIGHTS_INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
BAD_JSON = (ValueError, OverflowError, RecursionError)  # raised for malformed or hostile JSON
NO_GGUF = "GGUF is not served; give the safetensors checkpoint it was converted from."
WHERE = (
    f"Give a folder with config.json and *.safetensors, {', '.join(DEMO_FOLDERS)}, or "
    "ORG/NAME on huggingface.co (`penstock serve` and `penstock pull` download it)."
)
POINTER = b"version https://git-lfs.github.com/"

# Panels of --help and of docs/flags.md.
MODEL = "Model"
SCHEDULING = "KV cache and scheduling"

Count = Annotated[int, Meta(ge=1)]
Threads = Annotated[int, Meta(ge=1, le=1024)]  # OpenMP crashes with tens of thousands
Seconds = Annotated[float, Meta(gt=0.0)]
Size = Annotated[int, Meta(ge=1, extra={"size": True})]  # may be written as 32k or 2GiB
# Upper limit for the tokens of a step or of a sequence.
MOST_TOKENS = 2**24  # fp32 cannot represent every larger position
Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS, extra={"size": True})]


def setting(panel: str, text: str, **more: Any) -> Meta:
    """Return a field's help panel and text; `more` takes further arguments of msgspec.Meta."""
    return Meta(title=panel, description=text, **more)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model to load and how to run it. Sizes are in tokens, blocks or bytes, as stated."""

    model: Annotated[
        str,
        setting(
            MODEL,
            "A Hugging Face model folder, ORG/NAME on huggingface.co (taken from the cache or "
            "downloaded), or the built-in models `demo` and `demo-translate`.",
        ),
    ] = DEMO_MODEL
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        setting(MODEL, "Dtype of weights and KV cache; auto: bfloat16 if the device supports it."),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], setting(MODEL, "Device; auto uses a GPU if there is one.")
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "torch", "triton", "numba"],
        setting(
            MODEL,
            "auto: Penstock's Triton kernels on a GPU, torch on a CPU. numba compiles faster "
            "kernels for a CPU, for attention and other operations.",
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["safetensors", "dummy"],
        setting(MODEL, "dummy: random weights, for benchmarks; only config.json is needed."),
    ] = "safetensors"
    max_model_len: Annotated[
        Tokens | None,
        setting(MODEL, "Most tokens of prompt plus answer; default: the model's own limit."),
    ] = None
    threads: Annotated[
        Threads | None,
        setting(MODEL, "CPU threads of the engine; default: all. Leave cores to busy programs."),
    ] = None
    prepack: Annotated[
        bool, setting(MODEL, "Prepack linear weights for oneDNN on a CPU (faster).")
    ] = True
    enforce_eager: Annotated[
        bool, setting(MODEL, "Launch kernels one by one, without CUDA graphs.")
    ] = False
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
            "Encoder token budget of one step. Texts are not split; a text above the budget is "
            "encoded alone. Default: 1024 on a CPU, 16384 on a GPU.",
        ),
    ] = None
    block_size: Annotated[
        Literal[16, 32, 64, 128], setting(SCHEDULING, "Tokens in one KV block.")
    ] = 64
    gpu_memory_utilization: Annotated[
        float,
        setting(
            SCHEDULING,
            "Share of a GPU's memory to use; the KV cache gets what the model leaves of it.",
            gt=0,
            le=1,
        ),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        Size | None,
        setting(
            SCHEDULING,
            "Bytes for the KV cache. Default on a GPU: the rest of --gpu-memory-utilization. "
            "Default on a CPU: enough for --max-num-seqs sequences of full length, but at most a "
            "quarter of the free memory.",
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        Count | None,
        setting(SCHEDULING, "Number of KV blocks on any device; overrides the size in bytes."),
    ] = None
    enable_prefix_caching: Annotated[
        bool, setting(SCHEDULING, "Reuse the KV of prompts with a common prefix.")
    ] = True
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
            "Longest expected wait in the queue, in seconds; requests that would wait longer get "
            "a 503 at once. The wait is estimated from recent admissions. Default: no limit.",
        ),
    ] = None
    stall_timeout: Annotated[
        Seconds,
        setting(
            SCHEDULING,
            "Seconds without a message from an engine that has work before it counts as hung. It "
            "is then killed, its requests fail, and the server exits with status 3.",
        ),
    ] = 120.0


def is_hub_name(model: str) -> bool:
    """Return whether `model` has the form ORG/NAME and is no local path.

    The server looks such a name up on the hub. Raises ConfigError if the path cannot be checked.
    """
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model, re.ASCII):
        return False
    try:
        return not Path(model).exists()
    except OSError as error:
        raise ConfigError(f"Cannot check whether {model} is a local folder: {error}") from error


def full_path(path: Path) -> Path:
    """Return `path` as an absolute path without `~` and links. Raises ConfigError if that fails."""
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # unknown user, circular links, a NUL
        raise ConfigError(f"{path} is not a usable path: {error}") from error


def model_folder(model: str) -> Path:
    """Return the folder of `model`. Raises ConfigError if it has no config.json."""
    demo = Path(__file__).parent / "demo"
    folder = demo / DEMO_FOLDERS[model] if model in DEMO_FOLDERS else Path(model)
    if not model or "://" in model:
        raise ConfigError(f"{model!r} is not a model name. {WHERE}")
    folder = full_path(folder)
    try:
        is_folder, has_config = folder.is_dir(), (folder / "config.json").is_file()
        is_file = folder.is_file()
    except OSError as error:
        raise ConfigError(f"Cannot access the model folder: {error}") from error
    if folder.suffix.lower() == ".gguf":
        raise ConfigError(f"{folder}: {NO_GGUF}")
    if is_file:
        raise ConfigError(f"{folder} is a file; give its folder.")
    if not is_folder:
        raise ConfigError(f"No model folder at {folder}. {WHERE}")
    if not has_config:
        hint = f" {NO_GGUF}" if _files(folder, "gguf") else ""
        raise ConfigError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder.{hint}"
        )
    return folder


def _files(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"*.{suffix}"))


def weight_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files: those in its index if it has one, else all."""
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        files = [folder / name for name in indexed_files(index)]
        # A name must be a file in this folder, never a path to another folder.
        if missing := [f.name for f in files if f.parent != folder or not f.is_file()]:
            raise ConfigError(f"{index} lists files not in {folder}: {', '.join(missing)}.")
        return files
    if files := _files(folder, "safetensors"):
        return files
    if gguf := _files(folder, "gguf"):
        raise ConfigError(f"{folder} has no *.safetensors, only {gguf[0].name}. {NO_GGUF}")
    raise ConfigError(f"{folder} has no *.safetensors, the only supported weight format.")


def indexed_files(index: Path) -> list[str]:
    """Return the file names in a safetensors index. Raises ConfigError if it has none."""
    mapped = read_json(index).get("weight_map")
    values = list(mapped.values()) if isinstance(mapped, dict) else []
    if not values or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{index} has no weight_map from tensor names to file names.")
    return sorted(set(values))


def refuse_pointer(file: Path) -> None:
    """Raise ConfigError if `file` is a Git LFS pointer, left by a clone without Git LFS."""
    try:
        with file.open("rb") as stream:
            is_pointer = stream.read(len(POINTER)) == POINTER
    except OSError:
        return  # the caller reports it when it reads the file
    if is_pointer:
        raise ConfigError(
            f"{file} is a Git LFS pointer, not the file. Run `git lfs pull` in its folder, or "
            "`penstock pull ORG/NAME`."
        )


def safetensors_header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file without `__metadata__`: name -> {dtype, shape,
    data_offsets}.

    The format is 8 bytes of header length, a JSON header and the data. Raises ConfigError if the
    file is malformed, or shorter or longer than its header says.
    """
    refuse_pointer(file)
    said = f"{file} is not a readable safetensors file: "
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > MAX_HEADER_BYTES or 8 + length > size:
                raise ConfigError(f"{said}a header of {length} bytes in a file of {size} bytes.")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        ends = {name: int(entry["data_offsets"][1]) for name, entry in header.items()}
    except (OSError, LookupError, TypeError, AttributeError, *BAD_JSON) as error:
        raise ConfigError(f"{said}{error!r}.") from error
    due = 8 + length + max(ends.values(), default=0)
    if size != due:
        lost = [
            name for name in sorted(ends, key=ends.__getitem__) if 8 + length + ends[name] > size
        ]
        where = f", cut off in {lost[0]}" if lost else ""
        raise ConfigError(
            f"{said}it has {size} bytes, its header says {due}{where}. Copy or download it again."
        )
    return header


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigError with the file name if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # rejects lone surrogates such as \ud800
    except (OSError, *BAD_JSON) as error:
        raise ConfigError(f"Cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value
