"""llama.cpp's own library: the numbers of its tensors, and the losses of its models.

The ctypes bindings are those in the source of llama-cpp-python, and the library is the one that
`environments.py` has built of the same source.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

FP32 = 0  # GGML_TYPE_F32
NO_FLASH_ATTENTION = 0  # LLAMA_FLASH_ATTN_TYPE_DISABLED


class _TypeTraits(ctypes.Structure):
    """`struct ggml_type_traits` in ggml.h."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("from_float_ref", ctypes.c_void_p),
    )


def dequantized(home: Path, raw: np.ndarray, number: int) -> np.ndarray:
    """Return the numbers fp32 of blocks uint8 [n, bytes of a block] of a type of ggml."""
    library: Any = ctypes.CDLL(str(home / "build" / "bin" / "libggml-base.so"))
    library.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
    library.ggml_init(0, None, False)  # fills the table of fp16 numbers
    traits = library.ggml_get_type_traits(number).contents
    assert raw.shape[1] == traits.type_size, f"{traits.type_name}: {traits.type_size} bytes"
    blocks = np.ascontiguousarray(raw)
    found = np.empty(len(raw) * traits.block, np.float32)
    traits.to_float(blocks.ctypes.data, found.ctypes.data, found.size)
    return found


def bindings(home: Path) -> ModuleType:
    """Return the module of the bindings, without the package's other dependencies."""
    [package] = (home / "source").glob("*/llama_cpp")
    parent = ModuleType("llama_cpp")
    parent.__path__ = [str(package)]
    sys.modules["llama_cpp"] = parent
    os.environ["LLAMA_CPP_LIB_PATH"] = str(home / "build" / "bin")
    return importlib.import_module("llama_cpp.llama_cpp")


def losses(home: Path, file: Path, windows: Sequence[Sequence[int]]) -> list[float]:
    """Return -log p of all tokens but the first of each window. A window is one batch.

    It computes on one thread: more would wait for each other while the machine has other work.
    A library that is built with BLAS multiplies weights and inputs in fp32. The KV cache is then in
    fp32 too. Without BLAS, llama.cpp rounds inputs of quantised matrices to 8 bits.
    """
    llama: Any = bindings(home)
    silent = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    has_blas = (home / "build" / "bin" / "libggml-blas.so").exists()
    loading = llama.llama_model_default_params()
    loading.use_extra_bufts = not has_blas  # BLAS reads no repacked weights
    model = llama.llama_model_load_from_file(str(file).encode(), loading)
    assert model, f"llama.cpp does not load {file}"
    longest = max(map(len, windows))
    settings = llama.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = longest
    settings.n_threads = settings.n_threads_batch = 1
    if has_blas:
        settings.type_k = settings.type_v = FP32
        settings.flash_attn_type = NO_FLASH_ATTENTION
    context = llama.llama_init_from_model(model, settings)
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    scored: list[float] = []
    for window in windows:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        batch = llama.llama_batch_init(longest, 0, 1)
        batch.n_tokens = len(window)
        for place, token in enumerate(window):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        assert not llama.llama_decode(context, batch)
        found = llama.llama_get_logits(context)
        rows = np.ctypeslib.as_array(found, (len(window), size))
        for logits, token in zip(rows, window[1:], strict=False):  # none after the last row
            largest = logits.max()
            total = np.exp(logits - largest).sum(dtype=np.float64)
            scored.append(float(np.log(total) + largest - logits[token]))
        llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return scored


def write_even_importance(path: Path, inputs: Mapping[str, int]) -> None:
    """Write an importance matrix of ones, for weights by name with their numbers of inputs.

    It is in the older format of `llama-imatrix`, which has no metadata.
    """
    with path.open("wb") as out:
        out.write(struct.pack("<i", len(inputs)))
        for name, count in inputs.items():
            raw = name.encode()
            out.write(struct.pack("<i", len(raw)) + raw)
            out.write(struct.pack("<ii", 1, count) + np.ones(count, "<f4").tobytes())


if __name__ == "__main__":
    import json

    given = json.load(sys.stdin)
    print(json.dumps(losses(Path(given["home"]), Path(given["file"]), given["windows"])))
