"""EngineConfig: every choice the engine takes, declared once.

Flags, environment names, the YAML keys, validation and the flags table in the docs all come from
these fields. A field left at None is decided at start (engine/runner/blueprint.py, which never
changes this object) and the decision is printed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.errors import ConfigError

# As /proc/cpuinfo calls the instructions that multiply bfloat16, of x86 and of Arm.
BF16_CPU_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
DEMO_MODEL = "demo"
DEMO_FOLDERS = {DEMO_MODEL: "model", "demo-translate": "translate"}  # in engine/demo

# Of a checkpoint, what is read besides its weights (patterns of fnmatch): what `pull` loads
# and `merge` takes over. Code and pickles are never among them.
CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",  # from here on: how sentence-transformers pools
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
)
WEIGHTS_INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
BAD_JSON = (ValueError, OverflowError, RecursionError)  # what a hostile one can raise
NO_GGUF = "GGUF is not served: give the checkpoint it was made from, in safetensors."
WHERE = (
    f"Give a folder with config.json and *.safetensors, {', '.join(DEMO_FOLDERS)}, or what is "
    "ORG/NAME on huggingface.co (`penstock serve` and `penstock pull` load that)."
)
POINTER = b"version https://git-lfs.github.com/"

# Panels of --help and of docs/flags.md.
MODEL = "Model"
SCHEDULING = "KV cache and scheduling"

Count = Annotated[int, Meta(ge=1)]
Threads = Annotated[int, Meta(ge=1, le=1024)]  # of tens of thousands OpenMP dies
Seconds = Annotated[float, Meta(gt=0.0)]
Size = Annotated[int, Meta(ge=1, extra={"size": True})]  # may be written as 32k or 2GiB
# Tokens that there is to be room for: of a step, or of a sequence.
MOST_TOKENS = 2**24  # fp32 tells no more positions apart
Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS, extra={"size": True})]


def setting(panel: str, text: str, **more: Any) -> Meta:
    """What is said of a field wherever it is shown; `more` as for msgspec.Meta."""
    return Meta(title=panel, description=text, **more)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to load and how to run it; sizes in tokens, blocks or bytes as each field says."""

    model: Annotated[
        str,
        setting(
            MODEL,
            "A Hugging Face model folder, ORG/NAME on huggingface.co (from the cache, else "
            "pulled), or `demo` or `demo-translate`, which are in the package.",
        ),
    ] = DEMO_MODEL
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        setting(MODEL, "Weights and KV cache; auto is bfloat16 where the device computes in it."),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], setting(MODEL, "auto takes a GPU where there is one.")
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "torch", "triton", "numba"],
        setting(
            MODEL,
            "auto takes our Triton kernels on a GPU, torch on a CPU. numba compiles kernels for a "
            "CPU, not only of attention: tokens come faster.",
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["safetensors", "dummy"],
        setting(MODEL, "dummy draws random weights: for measuring, config.json is enough."),
    ] = "safetensors"
    max_model_len: Annotated[
        Tokens | None,
        setting(MODEL, "Longest prompt plus answer, in tokens; default: the model's own."),
    ] = None
    threads: Annotated[
        Threads | None,
        setting(MODEL, "CPU threads of the engine; default: all cores. Busy programs need theirs."),
    ] = None
    prepack: Annotated[
        bool, setting(MODEL, "Prepack linear weights for oneDNN on a CPU (faster).")
    ] = True
    enforce_eager: Annotated[
        bool, setting(MODEL, "Launch steps kernel by kernel, not as CUDA graphs.")
    ] = False
    max_num_seqs: Annotated[
        int, setting(SCHEDULING, "Most sequences that run in one step.", ge=1, le=4096)
    ] = 128
    max_num_batched_tokens: Annotated[
        Tokens | None,
        setting(SCHEDULING, "Token budget of one step; default: 256 on a CPU, 2048 on a GPU."),
    ] = None
    max_num_encoder_tokens: Annotated[
        Tokens | None,
        setting(
            SCHEDULING,
            "Token budget of an encoder's part of a step, whole texts; a longer text goes alone. "
            "Default: 1024 on a CPU, 16384 on a GPU.",
        ),
    ] = None
    block_size: Annotated[
        Literal[16, 32, 64, 128], setting(SCHEDULING, "Tokens in one KV block.")
    ] = 64
    gpu_memory_utilization: Annotated[
        float,
        setting(
            SCHEDULING,
            "Share of a GPU's memory that is used; the KV cache gets what is left of it.",
            gt=0,
            le=1,
        ),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        Size | None,
        setting(
            SCHEDULING,
            "Bytes for the KV cache; default: on a GPU what is left of gpu_memory_utilization, on "
            "a CPU what max_num_seqs sequences of full length need, at most a quarter of the free "
            "memory.",
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        Count | None,
        setting(SCHEDULING, "Exact number of KV blocks, on any device; overrides the bytes."),
    ] = None
    enable_prefix_caching: Annotated[
        bool, setting(SCHEDULING, "Reuse the KV of prompts that begin alike.")
    ] = True
    max_num_queued_reqs: Annotated[
        Count, setting(SCHEDULING, "Waiting requests beyond which new ones get a 503.")
    ] = 512
    max_num_queued_tokens: Annotated[
        Size, setting(SCHEDULING, "Waiting prompt tokens beyond which new requests get a 503.")
    ] = 262144
    max_queue_wait: Annotated[
        Seconds | None,
        setting(
            SCHEDULING,
            "Seconds in the queue beyond which new requests get a 503 at once, judged by the pace "
            "at which it moves; default: no such bound.",
        ),
    ] = None
    stall_timeout: Annotated[
        Seconds,
        setting(
            SCHEDULING,
            "Seconds without a step, while there is work, after which the engine counts as hung: "
            "it is ended, its requests get an error, and the server leaves with status 3.",
        ),
    ] = 120.0


def is_hub_name(model: str) -> bool:
    """Whether `model` is ORG/NAME and nothing here has that name: the server looks it up. Raises
    ConfigError where that cannot be seen."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model, re.ASCII):
        return False
    try:
        return not Path(model).exists()
    except OSError as error:
        raise ConfigError(f"Cannot see whether {model} is a folder here: {error}") from error


def full_path(path: Path) -> Path:
    """`path` from the root on, without `~` and links; raises ConfigError where it leads nowhere."""
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, links in a circle, a NUL
        raise ConfigError(f"{path} is no usable path: {error}") from error


def model_folder(model: str) -> Path:
    """The folder `model` names; raises ConfigError where there is no config.json in it."""
    demo = Path(__file__).parent / "demo"
    folder = demo / DEMO_FOLDERS[model] if model in DEMO_FOLDERS else Path(model)
    if not model or "://" in model:
        raise ConfigError(f"{model!r} names no model. {WHERE}")
    folder = full_path(folder)
    try:
        is_folder, has_config = folder.is_dir(), (folder / "config.json").is_file()
        is_file = folder.is_file()
    except OSError as error:
        raise ConfigError(f"Cannot look for a model folder: {error}") from error
    if folder.suffix.lower() == ".gguf":
        raise ConfigError(f"{folder}: {NO_GGUF}")
    if is_file:
        raise ConfigError(f"{folder} is a file: give the folder it is in.")
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
    """The checkpoint's safetensors files, from its index where there is one."""
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        files = [folder / name for name in indexed_files(index)]
        # A name is a file of this folder, never a path out of it.
        if missing := [f.name for f in files if f.parent != folder or not f.is_file()]:
            raise ConfigError(f"{index} names {', '.join(missing)}, which is not in {folder}.")
        return files
    if files := _files(folder, "safetensors"):
        return files
    if gguf := _files(folder, "gguf"):
        raise ConfigError(f"{folder} has no *.safetensors but {gguf[0].name}. {NO_GGUF}")
    raise ConfigError(f"{folder} has no *.safetensors; other weight formats are not read.")


def indexed_files(index: Path) -> list[str]:
    """The file names in a safetensors index; raises ConfigError where it holds none."""
    mapped = read_json(index).get("weight_map")
    values = list(mapped.values()) if isinstance(mapped, dict) else []
    if not values or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{index} holds no weight_map from tensor names to file names.")
    return sorted(set(values))


def refuse_pointer(file: Path) -> None:
    """Raises ConfigError where a file is what git leaves in place of it without Git LFS."""
    try:
        with file.open("rb") as stream:
            is_pointer = stream.read(len(POINTER)) == POINTER
    except OSError:
        return  # told of by whoever reads it
    if is_pointer:
        raise ConfigError(
            f"{file} is a Git LFS pointer, not the file: run `git lfs pull` in its folder, or "
            "`penstock pull ORG/NAME`."
        )


def safetensors_header(file: Path) -> dict[str, Any]:
    """What a safetensors file declares: name -> {dtype, shape, data_offsets}, `__metadata__` left
    out. Raises ConfigError where the file is shorter or longer than that; the format (8 bytes
    length, JSON, data) allows neither."""
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
    """A JSON object from a file; raises ConfigError naming the file where it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair (\ud800) is no text
    except (OSError, *BAD_JSON) as error:
        raise ConfigError(f"Cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value
