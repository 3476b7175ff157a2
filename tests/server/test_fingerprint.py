"""`system_fingerprint` differs where tokens may differ, and only there."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from server.adapters import ServedAdapter
from server.fingerprint import fingerprint_of, fingerprint_settings
from tests.support.fake_engine import INFO


def fingerprint(adapter: ServedAdapter | None = None, **facts: Any) -> str:
    return fingerprint_of(fingerprint_settings("1.0", replace(INFO, **facts), adapter))


@pytest.mark.parametrize(
    "facts",
    [
        {"weights": "another"},
        {"architecture": "Another"},
        {"parameters": 2},
        {"dtype": "bfloat16"},
        {"quantization": "int4"},
        {"kv_cache_dtype": "int8"},
        {"device": "cuda:0"},
        {"attention_backend": "torch"},
        {"block_size": 2 * INFO.block_size},
        {"other_ranks": (INFO.memory,)},
        {"batch_variance": "amx"},
        {"kernel_features": ()},
        {"kernel_features": ("overlap",)},
    ],
)
def test_fingerprint_of_a_server_with_other_numbers_differs(facts: dict[str, Any]) -> None:
    assert fingerprint(**facts) != fingerprint()


@pytest.mark.parametrize(
    "facts",
    [
        {"speculative_model": "small"},
        {"drafts_by_head": True},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 8},
        {"num_blocks": 2},
        {"load_seconds": 9.0},
        {"max_loras": 3},
    ],
)
def test_fingerprint_with_settings_that_change_no_token_is_the_same(facts: dict[str, Any]) -> None:
    assert fingerprint(**facts) == fingerprint()


def test_fingerprint_of_an_adapter_differs_by_name_and_path() -> None:
    adapters = [None, *(ServedAdapter(1, name, path, 0) for name in "ab" for path in ("/x", "/y"))]
    assert len({fingerprint(adapter) for adapter in adapters}) == len(adapters)


def test_fingerprint_of_another_version_differs() -> None:
    prints = {fingerprint_of(fingerprint_settings(version, INFO)) for version in ("1.0", "1.1")}
    assert len(prints) == 2
