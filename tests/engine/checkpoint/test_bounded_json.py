"""JSON of a checkpoint: limits, and values that no setting has."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.checkpoint.bounded_json import BAD_JSON, MAX_JSON_BYTES, MAX_PARTS, loads, read_json
from engine.checkpoint.folder import indexed_files, safetensors_header
from engine.errors import ConfigError

MANY = MAX_PARTS // 2 + 1
# Collecting the tests makes no text of megabytes: each has a function that makes it.
HOSTILE: dict[str, Callable[[], bytes]] = {
    "bytes": lambda: b'{"a": "' + b"x" * MAX_JSON_BYTES + b'"}',
    "lists": lambda: b'{"a": [' + b"[]," * 2 * MANY + b"[]]}",
    "objects": lambda: b'{"a": [' + b"{}," * 2 * MANY + b"{}]}",
    "keys": lambda: b"{" + b",".join(b'"%x":0' % n for n in range(2 * MANY)) + b"}",
    "objects of keys": lambda: b"[" + b'{"":0},' * MANY + b"{}]",
    "nesting": lambda: b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested objects": lambda: b'{"a": ' * 100_000 + b"0" + b"}" * 100_000,
    "number": lambda: b'{"a": ' + b"9" * 5000 + b"}",
    "large number": lambda: b'{"a": ' + b"9" * 400 + b"}",
    "lone surrogate": lambda: rb'{"a": "\ud800"}',
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_hostile_json_is_refused(make: Callable[[], bytes]) -> None:
    with pytest.raises(BAD_JSON):
        loads(make())


@pytest.mark.parametrize("kind", ["bytes", "lists", "keys", "nesting"])
@pytest.mark.parametrize("read", [read_json, indexed_files])
def test_hostile_file_is_refused_with_its_name(
    tmp_path: Path, read: Callable[[Path], object], kind: str
) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(HOSTILE[kind]())
    with pytest.raises(ConfigError, match=r"Cannot read .*config\.json"):
        read(file)


@pytest.mark.parametrize("kind", ["bytes", "lists", "keys", "nesting"])
def test_hostile_header_is_refused_with_its_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.safetensors"
    header = HOSTILE[kind]()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable"):
        safetensors_header(file)


def test_header_of_two_hundred_thousand_tensors_is_read() -> None:
    entry = (
        b'"%s.%d":{"dtype":"BF16","shape":[4096,4096],"data_offsets":[100000000000,100000000000]}'
    )
    name = b"model.layers.experts.weight"
    found = loads(b"{" + b",".join(entry % (name, n) for n in range(200_000)) + b"}")
    assert len(found) == 200_000


def test_marks_in_texts_and_escapes_are_read() -> None:
    assert loads(rb'{"a": "[{:\u00e9\ud83d\ude00", "b": 1e3}') == {"a": "[{:é😀", "b": 1000.0}
