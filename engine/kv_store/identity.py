"""A digest of all that the bytes of a block depend on, and the models that are refused."""

from __future__ import annotations

import hashlib
import platform
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

import engine
from engine.checkpoint.folder import weight_files
from engine.errors import ConfigError
from engine.memory.model_plan import ModelPlan
from engine.protocol.ready import Ready

# Settings that change neither the bytes of a block nor their meaning. Any other makes blocks of
# their own, also one that is added later.
WITHOUT_EFFECT = (
    "model",  # its weights count, wherever they are
    "kv_cache_dir",
    "kv_cache_dir_bytes",
    "lora_modules",  # blocks of adapters are not kept
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_encoder_tokens",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "state_memory_bytes",
    "num_gpu_blocks_override",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "max_queue_wait",
    "stall_timeout",
)
# Files of a checkpoint next to its weights: its sizes, its codes, and how pixels are scaled.
SETTINGS = (
    "config.json",
    "hf_quant_config.json",
    "processor_config.json",
    "preprocessor_config.json",
)
PIECE_BYTES = 16 << 20  # of weights that a thread hashes at a time
# Rooms whose code decides what the bytes of a block are.
CODE = (
    "attention",
    "checkpoint",
    "kernels",
    "kv_store",
    "layers",
    "memory",
    "models",
    "ops",
    "runner",
    "scheduling",
    "vision",
)
PACKAGES = ("torch", "numba", "llvmlite", "triton")


def check_model(plan: ModelPlan, block_bytes: int) -> None:
    """Raise ConfigError if the blocks of this model cannot be kept in files."""
    if plan.kind != "decoder":
        raise ConfigError(
            f"--kv-cache-dir is for decoders; {plan.architecture} is an {plan.kind}. Leave it out."
        )
    if plan.state_specs:
        raise ConfigError(
            f"--kv-cache-dir keeps keys and values; {plan.architecture} also has recurrent states, "
            "which are not kept. Leave it out."
        )
    if plan.config.kv_cache_dir_bytes < block_bytes:
        raise ConfigError(
            f"--kv-cache-dir-bytes {plan.config.kv_cache_dir_bytes} is less than a block of this "
            f"model takes: {block_bytes} bytes."
        )


def model_digest(plan: ModelPlan, facts: Ready) -> bytes:
    """Return a digest of all that changes the bytes of a block or their meaning, 32 bytes.

    It has all weights, the settings, the processor and the code. Raises OSError.
    """
    settings = msgspec.structs.asdict(plan.config)
    for name in WITHOUT_EFFECT:
        del settings[name]
    parts = [
        _checkpoint(plan.folder, facts.threads),
        facts.architecture,
        facts.dtype,
        facts.attention_backend,
        str(plan.kv_dtype),
        str(plan.kernels),
        str(facts.threads),
        repr(plan.kv_specs),
        repr(sorted(settings.items())),
        _processor(plan.device),
        *(f"{name} {_version(name)}" for name in PACKAGES),
        _code().hex(),
    ]
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.digest()


def _checkpoint(folder: Path, threads: int) -> str:
    """Return a digest of the weights in a folder and of the settings next to them, in hex.

    `Ready.weights` reads a sample of large files only, which does not find every edit.
    """
    files = [folder / name for name in SETTINGS if (folder / name).is_file()]
    files += weight_files(folder)
    pieces = [
        (file, start) for file in files for start in range(0, file.stat().st_size, PIECE_BYTES)
    ]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(threads) as pool:
        for (_, start), found in zip(pieces, pool.map(_of_piece, pieces), strict=True):
            digest.update(start.to_bytes(8, "little") + found)
    return digest.hexdigest()


def _of_piece(piece: tuple[Path, int]) -> bytes:
    file, start = piece
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        return hashlib.sha256(stream.read(PIECE_BYTES)).digest()


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    from engine.kernels.numba.cpu import cpu_features, cpu_name

    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {cpu_name()} {cpu_features()} {capability}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _code() -> bytes:
    """Return a digest of the source code that decides what a block holds."""
    root = Path(engine.__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for room in CODE:
        for file in sorted((root / room).rglob("*.py")):
            digest.update(hashlib.blake2b(file.read_bytes()).digest())
    return digest.digest()
