"""Headers of GGUF files: what is read, and that no damage leads beyond the file."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.checkpoint.gguf.header import MAX_ENTRIES, MAX_VALUES, read_header
from engine.checkpoint.gguf.kinds import KINDS, OTHERS, REMOVED
from engine.errors import ConfigError

STRING, ARRAY, UINT8, UINT32 = 8, 9, 0, 4


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def setting(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def begin(tensors: int = 0, settings: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, settings)


def test_header_equals_that_of_the_library(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    given: dict[str, Any] = {"a": 3, "b": -4, "c": 0.5, "d": True, "e": "ü", "f": 2**40}
    writer.add_uint32("a", 3)
    writer.add_int32("b", -4)
    writer.add_float32("c", 0.5)
    writer.add_bool("d", True)
    writer.add_string("e", "ü")
    writer.add_uint64("f", 2**40)
    writer.add_array("g", [1, 2, 3])
    writer.add_array("h", ["x", "", "yz"])
    numbers = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("plain", numbers)
    packed = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    header = read_header(file)
    assert header.settings == given | {
        "g": [1, 2, 3],
        "h": ["x", "", "yz"],
        "general.architecture": "llama",
    }
    for theirs in gguf.GGUFReader(file).tensors:
        ours = header.tensors[theirs.name]
        assert (ours.offset, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
        assert ours.shape == (3, 32)
    assert header.tensors["packed"].kind.name == "Q8_0"


ENDLESS = struct.pack("<IQ", UINT8, 2**62)
NESTED = struct.pack("<IQ", ARRAY, 1) * 9
DAMAGED = {
    "empty": (b"", "not a readable GGUF file"),
    "other file": (b"PK\3\4" * 9, "does not begin with GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
    "version 1": (begin(version=1), "version 1 is unknown"),
    "many tensors": (begin(2**60), f"it says that it has {2**60} tensors"),
    "many settings": (begin(0, MAX_ENTRIES + 1), "settings"),
    "tensors that are not there": (begin(5), "is expected in a file of 24 bytes"),
    "long name": (begin(0, 1) + struct.pack("<Q", 2**63), "is expected in a file"),
    "unknown type": (begin(0, 1) + setting("a", 77, b"12345678"), "the unknown type 77"),
    "endless array": (begin(0, 1) + setting("a", ARRAY, ENDLESS), "it has 4611686018427387904 val"),
    "array beyond the end": (
        begin(0, 1) + setting("a", ARRAY, struct.pack("<IQ", UINT32, 1000)),
        "is expected in a file",
    ),
    "endless texts": (
        begin(0, 1) + setting("a", ARRAY, struct.pack("<IQ", STRING, 10**6)),
        "is expected in a file",
    ),
    "nested arrays": (begin(0, 1) + setting("a", ARRAY, NESTED), "nests more than 4 arrays"),
    "twice": (begin(0, 2) + setting("a", UINT8, b"1") * 2, "'a' is there twice"),
    "tensor twice": (begin(2) + tensor("t", (1,)) * 2 + b"\0" * 64, "'t' is there twice"),
    "alignment": (
        begin(0, 1) + setting("general.alignment", UINT32, struct.pack("<I", 3)),
        "not a power of two",
    ),
    "dimensions": (begin(1) + tensor("t", (1,) * 9), "'t' has 9 dimensions"),
    "no dimension": (begin(1) + tensor("t", ()), "of shape \\[\\] cannot be F32"),
    "row of part of a block": (
        begin(1) + tensor("t", (31,), kind=8) + b"\0" * 99,
        "of shape \\[31\\] cannot be Q8_0",
    ),
    "not served": (
        begin(1) + tensor("t", (256,), kind=15),
        "'t' in .* has the type Q8_K, which is not served. Served are",
    ),
    "removed": (begin(1) + tensor("t", (256,), kind=4), "type Q4_2, which llama.cpp has removed"),
    "unknown encoding": (
        begin(1) + tensor("t", (256,), kind=99),
        "type number 99, which is unknown",
    ),
    "cut off": (begin(1) + tensor("t", (2**40,)), "the file was cut off"),
    "offset": (begin(1) + tensor("t", (4,), offset=2**63), "the file was cut off"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_header_is_refused(case: str, tmp_path: Path) -> None:
    content, words = DAMAGED[case]
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_header(file)


def test_types_have_the_names_of_the_library() -> None:
    known = {number: kind.name for number, kind in KINDS.items()} | OTHERS
    named = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert known == named | {42: "Q2_0"}  # newer than the pinned library
    assert not known.keys() & REMOVED.keys()
    assert REMOVED.keys() | known.keys() == set(range(43))
    sizes = gguf.GGML_QUANT_SIZES
    for number, kind in KINDS.items():
        due = (64, 18) if kind.name == "Q2_0" else sizes[gguf.GGMLQuantizationType(number)]
        assert (kind.block, kind.nbytes) == due, kind.name


@pytest.mark.parametrize("kind", ["Q8_1", "I32", "F64"])
def test_valid_file_of_another_type_is_no_damaged_file(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    number = next(number for number, name in OTHERS.items() if name == kind)
    file.write_bytes(begin(1) + tensor("blk.0.attn_q.weight", (256, 2), kind=number) + b"\0" * 999)
    with pytest.raises(ConfigError) as error:
        read_header(file)
    words = str(error.value)
    assert "readable" not in words
    assert f"'blk.0.attn_q.weight' in {file} has the type {kind}, which is not served" in words
    assert "Served are BF16, F16, F32, IQ1_M" in words


def test_random_damage_is_refused_or_read(tmp_path: Path) -> None:
    """Of any content, a header is read or ConfigError is raised, in memory of the file's size."""
    rng = random.Random(1)
    good = begin(1, 2) + setting("a", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("y"))
    good += setting("b", UINT32, b"1234") + tensor("t", (4, 2)) + b"\0" * 64
    file = tmp_path / "a.gguf"
    for _ in range(2000):
        content = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            content[rng.randrange(len(content))] = rng.choice([0, 1, 127, 128, 255])
        file.write_bytes(content[: rng.randrange(len(content))] if rng.random() < 0.3 else content)
        try:
            found = read_header(file)
        except ConfigError:
            continue
        assert all(t.offset + t.nbytes <= len(content) for t in found.tensors.values())


def test_arrays_beyond_the_limit_of_all_values_are_refused(tmp_path: Path) -> None:
    """An integer of two bytes takes 36 in a list."""
    file = tmp_path / "a.gguf"
    count = MAX_VALUES // MAX_ENTRIES
    array = struct.pack("<IQ", 2, MAX_ENTRIES) + b"\1\2" * MAX_ENTRIES
    arrays = b"".join(setting(f"a{n}", ARRAY, array) for n in range(count))
    file.write_bytes(begin(settings=count) + arrays)
    assert len(read_header(file).settings) == count
    one = setting("b", ARRAY, struct.pack("<IQ", 2, 1) + b"\1\2")
    file.write_bytes(begin(settings=count + 1) + arrays + one)
    with pytest.raises(ConfigError, match=f"arrays have more than {MAX_VALUES} values"):
        read_header(file)
