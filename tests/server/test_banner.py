"""What the banner says of a model that not every one has; the whole of it is in test_launch.py."""

from __future__ import annotations

import json
import shlex
from typing import Any

import msgspec
import pytest

from engine.protocol import KVGroup, MemoryEntry
from server.banner import arithmetic, curl, kv_cache, memory, not_followed
from tests.server.fake_engine import INFO


def test_it_tells_what_takes_memory() -> None:
    entries = MemoryEntry("weights", 1234567, 1234568), MemoryEntry("largest step", 99)
    entries += (MemoryEntry("KV cache", 0, 0),)  # an encoder's
    lines = memory(msgspec.structs.replace(INFO, memory=entries))
    assert [line.split() for line in lines[1:]] == [
        ["1,234,567", "1,234,568", "weights"],
        ["99", "largest", "step"],
    ]
    assert memory(INFO) == []


@pytest.mark.parametrize(
    ("uneven", "cure"),
    [
        ("amx", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        ("onednn", "torch 2.11 and newer"),
        ("unpacked", "--prepack makes"),
    ],
)
def test_it_tells_where_bits_depend_on_the_batch(uneven: Any, cure: str) -> None:
    (note,) = arithmetic(msgspec.structs.replace(INFO, uneven=uneven))
    assert cure in note
    assert arithmetic(INFO) == []


def test_it_tells_that_bf16_is_slow_on_a_cpu_without_it() -> None:
    (note,) = arithmetic(msgspec.structs.replace(INFO, emulated=True))
    assert "--dtype float32" in note


def test_it_tells_what_the_checkpoint_asks_for_in_vain() -> None:
    (note,) = not_followed(["num_beams 6", "typical_p 0.9"])
    assert "not followed: num_beams 6, typical_p 0.9" in note
    assert not_followed([]) == []


def test_it_tells_what_windows_save() -> None:
    """Gemma 2 at 8k: 13 of 26 layers see 4096 tokens."""
    ready = msgspec.structs.replace(
        INFO,
        max_model_len=8192,
        block_size=64,
        num_blocks=1024,
        kv_groups=(KVGroup(13), KVGroup(13, window=4096)),
    )
    page = "\n".join(kv_cache(ready))
    assert "13 of 26 layers keep the last 4096 tokens: 23% less KV" in page
    # Full layers hold 128 blocks of a request, the others 69: 4095 and a step's 256 tokens.
    assert f"{1024 / (128 + 69):.1f} requests of full length" in page


async def test_the_line_to_try_fits_a_short_context(served: Any) -> None:
    """With room for the template's own tokens."""
    service = served.app.state.service
    for length in (16, 64, 8192):
        line = curl(service, msgspec.structs.replace(INFO, max_model_len=length), "http://x", "")
        body = json.loads(shlex.split(line)[-1])
        assert body["max_tokens"] == min(length // 4, 64)
