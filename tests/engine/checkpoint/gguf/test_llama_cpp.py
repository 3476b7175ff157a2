"""Tiny models against llama.cpp: every setting and tensor that it reads changes the same numbers.

The numbers are those of `xllamacpp` 2026.10.11549 (`tests/support/llama_cpp_cases.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.forward import forward, whole
from tests.support.golden import load
from tests.support.llama_cpp_cases import ANSWERS, CASES, PROMPT

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
DUE = json.loads(ANSWERS.read_text())
TOLERANCE = 0.02  # llama.cpp rounds the GELU of Gemma and GPT-2 to fp16


@pytest.mark.parametrize("name", CASES)
@pytest.mark.variants(16)
def test_next_tokens_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    file = CASES[name].write(tmp_path / "tiny.gguf")
    logits = forward(load(file), [PROMPT], whole([PROMPT]))[0][-1]
    due = torch.tensor(DUE[name])
    found = logits.log_softmax(-1)[due[:, 0].int()]
    torch.testing.assert_close(found, due[:, 1], atol=TOLERANCE, rtol=0)


def test_every_case_has_numbers_and_changes_them() -> None:
    assert DUE.keys() == CASES.keys()
    without_effect = [
        *("no base", "none, factor", "lists for layers", "default caps", "default size"),
        *("window of few layers", "unread window", "parallel by key"),
        *("default base of windows", "default final cap"),
    ]
    for name, found in DUE.items():
        architecture, _, case = name.partition(":")
        plain = DUE[f"{architecture.split()[0]}: plain"]
        assert (found == plain) == (case.strip() in ("plain", *without_effect)), name


def test_keys_that_llama_cpp_does_not_read_leave_its_numbers() -> None:
    for name in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"):
        assert DUE[f"{name}: yarn with unread keys"] == DUE[f"{name}: yarn"]
