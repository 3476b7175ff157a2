"""Create the files that upstream's training writes, and import them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import regex
import torch

from engine.offline.nanochat.command import import_nanochat
from tests.support.naive_nanochat import Naive, Sizes

SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
ROOT = Path(__file__).resolve().parents[2]
SIZES = Sizes(vocab_size=300)
TINY = Naive(SIZES, windows=(128,) * 5, rows=320)  # a short window: 128 / 4, rounded up to 128
SPECIAL_TOKENS = [
    *("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
    *("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"),
]


def base_folder(folder: Path) -> Path:
    """Create a base folder of nanochat, with TINY as the fine-tuned model d5."""
    save_checkpoint(folder / "chatsft_checkpoints" / "d5", TINY)
    save_tokenizer(folder / "tokenizer", encoding_state(SIZES.vocab_size))
    return folder


def save_checkpoint(folder: Path, naive: Naive, step: int = 7, *, prefix: str = "") -> Path:
    """Write model_<step>.pt and meta_<step>.json."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {prefix + name: tensor for name, tensor in naive.tensors.items()}
    torch.save(state, folder / f"model_{step:06d}.pt")
    sizes = {key: value for key, value in asdict(naive.sizes).items() if value is not None}
    meta = {"step": step, "val_bpb": 1.0, "model_config": sizes, "user_config": {"run": "x"}}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(meta))
    return folder


def pickled_encoding(state: Any, protocol: int = 4) -> bytes:
    """Return the pickle of a tiktoken Encoding with this state, made without tiktoken."""

    class Encoding:
        def __getstate__(self) -> Any:
            return state

    Encoding.__module__, Encoding.__qualname__ = "tiktoken.core", "Encoding"
    core = ModuleType("tiktoken.core")
    core.Encoding = Encoding  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"tiktoken": ModuleType("tiktoken"), "tiktoken.core": core}):
        return pickle.dumps(Encoding(), protocol)


def encoding_state(vocab_size: int) -> dict[str, Any]:
    """Return the state of an Encoding with `vocab_size` tokens, trained on this file."""
    merged = trained(Path(__file__).read_text(), vocab_size - 256 - len(SPECIAL_TOKENS))
    tokens = [bytes([byte]) for byte in range(256)] + merged
    return {
        "name": "rustbpe",
        "pat_str": SPLIT,
        "mergeable_ranks": {token: rank for rank, token in enumerate(tokens)},
        "special_tokens": {token: len(tokens) + i for i, token in enumerate(SPECIAL_TOKENS)},
    }


@cache
def trained(text: str, count: int) -> list[bytes]:
    """Return the first `count` tokens of byte-pair encoding, which merges the commonest pair."""
    pieces = Counter(regex.findall(SPLIT, text))
    words = [([bytes([b]) for b in piece.encode()], times) for piece, times in pieces.items()]
    tokens: list[bytes] = []
    while len(tokens) < count:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for parts, times in words:
            for pair in pairwise(parts):
                pairs[pair] += times
        pair = max(pairs, key=lambda pair: (pairs[pair], pair))
        tokens.append(pair[0] + pair[1])
        for parts, _ in words:
            join(parts, pair)
    return tokens


def join(parts: list[bytes], pair: tuple[bytes, bytes]) -> None:
    """Merge every occurrence of `pair` in place, from left to right."""
    i = 0
    while i < len(parts) - 1:
        if (parts[i], parts[i + 1]) == pair:
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        i += 1


def encoded(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Encode like tiktoken: in each piece, repeatedly merge the neighbours of the lowest rank."""
    ids = []
    for piece in regex.findall(SPLIT, text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while len(parts) > 1:
            rank, at = min(
                (ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(pairwise(parts))
            )
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def save_tokenizer(folder: Path, state: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.pkl").write_bytes(pickled_encoding(state))


def penstock(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server", "import", "nanochat", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )


def imported(directory: Path, out: Path | None, **options: Any) -> tuple[Path, list[str]]:
    lines: list[str] = []
    given = {"step": None, "tokenizer": None} | options
    return import_nanochat(directory, out, say=lines.append, **given), lines
