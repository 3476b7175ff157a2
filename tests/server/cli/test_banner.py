"""Banner lines that depend on the model; test_launch.py tests the whole banner."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.config import AdapterSource
from engine.device.cache import make_cache_folder
from engine.memory.report import LARGEST_STEP, WEIGHTS
from engine.protocol.ready import KVGroup, MemoryEntry
from server.adapters import AdapterRegistry
from server.cli.banner import (
    adapters,
    answers,
    arithmetic,
    curl,
    device,
    drafts,
    kernels,
    kv_cache,
    memory,
    not_followed,
    system_messages,
    tokenizer_notes,
    unsafe_caches,
)
from tests.support.fake_engine import INFO


def test_memory_lists_calculated_and_measured_sizes() -> None:
    entries = MemoryEntry(WEIGHTS, 1234567, 1234568), MemoryEntry(LARGEST_STEP, 99)
    entries += (MemoryEntry("KV cache", 0, 0),)  # an encoder has no KV cache
    lines = memory(msgspec.structs.replace(INFO, memory=entries))
    assert [line.split() for line in lines[1:]] == [
        ["1.2", "MB", "1.2", "MB", "weights"],
        ["99", "bytes", "working", "memory", "of", "the", "largest", "step"],
    ]
    assert memory(msgspec.structs.replace(INFO, memory=())) == []


@pytest.mark.parametrize(
    ("batch_variance", "cure"),
    [
        ("amx", "--batch-invariant on"),
        ("gpu", "--device cpu"),
        ("onednn", "torch 2.11 or newer"),
        ("unpacked", "use --prepack"),
    ],
)
def test_arithmetic_with_batch_dependent_logits_names_the_setting(
    batch_variance: Any, cure: str
) -> None:
    (note,) = arithmetic(msgspec.structs.replace(INFO, batch_variance=batch_variance))
    assert cure in note
    assert arithmetic(INFO) == []


def test_arithmetic_without_use_of_amx_says_why() -> None:
    given = msgspec.structs.replace(INFO, amx_note="Linux refuses the permission")
    notes = arithmetic(msgspec.structs.replace(given, batch_variance="amx"))
    assert notes[0].endswith("linear layers do not use AMX: Linux refuses the permission")
    assert len(notes) == 2


def test_arithmetic_with_emulated_bf16_recommends_float32() -> None:
    (note,) = arithmetic(msgspec.structs.replace(INFO, emulates_bf16=True))
    assert "--dtype float32" in note


def test_adapters_are_named_if_the_model_takes_some() -> None:
    ready = msgspec.structs.replace(INFO, max_loras=4)
    given = [AdapterSource(1, "fr", "/a"), AdapterSource(2, "de", "/b")]
    lines = []
    for sources in (given, []):
        state: Any = SimpleNamespace(adapters=AdapterRegistry(["base"], sources))
        lines += adapters(state, ready)
        assert adapters(state, INFO) == []
    assert lines == [
        "  adapters  fr, de; up to 4 in memory",
        "  adapters  none yet; up to 4 in memory",
    ]


def test_kernels_are_shown_apart_from_weights_if_this_start_compiled_some() -> None:
    ready = msgspec.structs.replace(INFO, compiled_kernels=7, compile_seconds=21.34)
    assert kernels(ready, "auto") == ["  kernels   7 compiled in 21.3 s, once"]
    assert kernels(INFO, "auto") == []


@pytest.mark.parametrize(
    ("features", "wanted", "line"),
    [
        (("overlap", "folded"), "auto", "optimised: overlap, folded"),
        ((), "auto", "plain: no optimisation was measured on this GPU"),
        ((), "plain", "plain: --kernels plain"),
    ],
)
def test_kernels_of_a_gpu_name_the_features_that_are_on(
    features: tuple[str, ...], wanted: str, line: str
) -> None:
    ready = msgspec.structs.replace(INFO, kernel_features=features)
    assert kernels(ready, wanted) == [f"  kernels   {line}"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_banner_says_why_a_folder_of_kernels_is_not_used(
    device: str, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("penstock/kernels" if device == "cpu" else "triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    ready = msgspec.structs.replace(INFO, device=device)
    assert unsafe_caches(ready) == [], "an absent folder is no problem"
    make_cache_folder(folder)
    assert unsafe_caches(ready) == []
    folder.chmod(mode)
    (note,) = unsafe_caches(ready)
    assert f"{folder} can be written by other users (mode 0{mode:o})" in note


def test_drafts_name_what_drafts_unless_it_is_repeated_text() -> None:
    by_head = "  drafts    by the prediction head of the model (mtp)"
    by_text = "  drafts    by text that repeats, not the prediction head: The weights lack it."
    for field, value, line in (
        ("speculative_model", "org/small", "  drafts    by org/small"),
        ("drafts_by_head", True, by_head),
        ("head_unused", "The weights lack it.", by_text),
    ):
        assert drafts(msgspec.structs.replace(INFO, **{field: value})) == [line]
    assert drafts(INFO) == []


def test_device_of_several_ranks_names_their_number() -> None:
    assert device(INFO) == "cpu, 1 threads"
    ranks = msgspec.structs.replace(INFO, other_ranks=((), ()))
    assert device(ranks) == "cpu, 1 threads in each of 3 processes"


def test_not_followed_lists_ignored_generation_settings() -> None:
    (note,) = not_followed(["num_beams 6", "typical_p 0.9"])
    assert "ignored: num_beams 6, typical_p 0.9" in note
    assert not_followed([]) == []


def test_tokenizer_notes_say_how_texts_begin_and_end() -> None:
    state: Any = SimpleNamespace(tokenizer=SimpleNamespace(notes=["one"], ends_with_eos=True))
    first, second = tokenizer_notes(state, INFO)
    assert first == "  note      one"
    assert "ends each text with an end token" in second
    for kind in ("encoder", "encoder-decoder"):  # those need the token
        assert tokenizer_notes(state, msgspec.structs.replace(INFO, kind=kind)) == [first]


def test_kv_cache_with_sliding_windows_shows_the_saving() -> None:
    """Gemma 2 at 8k: 13 of 26 layers have a window of 4096 tokens."""
    ready = msgspec.structs.replace(
        INFO,
        max_model_len=8192,
        block_size=64,
        num_blocks=1024,
        kv_groups=(KVGroup(13), KVGroup(13, window=4096)),
    )
    page = "\n".join(kv_cache(ready))
    assert "13 of 26 layers keep only the last 4096 tokens: 23% less KV cache" in page
    # Full layers hold 128 blocks of a request. Windowed layers hold 69: 4095 tokens and the
    # 256 tokens of a step.
    assert f"room for {1024 / (128 + 69):.1f} requests of 8192 tokens" in page
    coded = msgspec.structs.replace(ready, kv_cache_bytes=10**9, kv_cache_dtype="fp8")
    assert "1.0 GB in fp8, taken as it fills (1024 blocks" in "\n".join(kv_cache(coded))
    small = msgspec.structs.replace(ready, kv_groups=(KVGroup(13),), max_model_len=64)
    assert "room for 1024 requests of 64 tokens" in "\n".join(kv_cache(small))


def test_kv_cache_of_layers_of_two_shapes_shows_what_windows_save() -> None:
    """Two narrow layers with a window take the room of a full one, as in Gemma 4."""
    groups = (KVGroup(2, window=20), KVGroup(1))
    for length, saved in ((128, 0), (4096, 45)):  # 64 + 6 of 128 blocks
        ready = msgspec.structs.replace(
            INFO, max_model_len=length, block_size=64, num_blocks=512, kv_groups=groups
        )
        page = "\n".join(kv_cache(ready))
        assert f"2 of 3 layers keep only the last 20 tokens: {saved}% less KV cache" in page


async def test_curl_with_short_context_leaves_room_for_the_template(served: Any) -> None:
    service = served.app.state.penstock
    for length in (16, 64, 8192):
        line = curl(service, msgspec.structs.replace(INFO, max_model_len=length), "http://x", "")
        body = json.loads(shlex.split(line)[-1])
        assert body["max_tokens"] == min(length // 4, 64)


@pytest.mark.parametrize(("is_first_only", "lines"), [(True, 1), (False, 0)])
def test_system_messages_says_that_they_are_merged(is_first_only: bool, lines: int) -> None:
    template: Any = SimpleNamespace(wants_system_first=is_first_only)
    template.for_tools = template
    found = system_messages(template)
    assert len(found) == lines
    assert all(line.startswith("  system    messages of a chat are merged") for line in found)
    assert system_messages(None) == []


async def test_answers_says_how_calls_are_read_and_whether_that_was_confirmed(served: Any) -> None:
    hermes = served.app.state.penstock.hermes
    found = replace(hermes, source="table", round_trips=True)
    assert answers(found) == [
        "  tools     hermes, found from the chat template, reads its own calls back"
    ]
    (line,) = answers(replace(found, source="flag", round_trips=False))
    assert "hermes, from --tool-call-parser, not confirmed" in line
    (line,) = answers(replace(found, calls_name=None, reasoning_mark="<think>"))
    assert line.endswith("describes tools (hermes), reasoning in <think>")
    assert answers(None) == []
