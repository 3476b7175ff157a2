"""SmolLM2 in every type of llama.cpp: equal numbers, and nearly its perplexity. Run it with

    .venv/bin/pytest -m slow tests/loadtest/test_gguf_types.py

It builds llama.cpp in `build/peers` if `make bench-peers` has not yet, which needs a network.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest

from engine.checkpoint.gguf.blocks import QUANTIZED
from engine.checkpoint.gguf.kinds import KINDS
from loadtest.micro import gguf_types
from loadtest.micro.gguf_types import MIXTURES, change, perplexity
from loadtest.peers.environments import InstallError, smollm2

ROOT = Path(__file__).parents[2]
TOKENS = 512
MOST_CHANGE = 0.03  # of so few tokens; the table in docs/gguf-types.md has more


def test_every_quantized_type_is_in_a_mixture() -> None:
    assert {kind for kind, _ in MIXTURES.values()} == set(QUANTIZED)
    assert {kind.name for kind in KINDS.values()} == {*QUANTIZED, "F32", "F16", "BF16"}


def test_change_is_that_of_perplexities_with_an_error() -> None:
    theirs = np.random.default_rng(1).uniform(1, 9, 1000)
    ours = theirs + np.tile([0.03, -0.01], 500)
    assert perplexity(ours) / perplexity(theirs) == pytest.approx(math.exp(0.01))
    assert change(list(ours), list(theirs)) == "+1.01 ± 0.06 %"


@pytest.mark.slow
@pytest.mark.parametrize("mixture", MIXTURES)
def test_numbers_and_perplexity_are_those_of_llama_cpp(mixture: str) -> None:
    root = ROOT / "build" / "peers"
    try:
        sources = gguf_types.sources_of(root, ROOT / "build" / "gguf-types")
    except InstallError as error:
        pytest.skip(f"llama.cpp or SmolLM2 cannot be installed: {error}")
    file = gguf_types.quantized(sources, mixture)
    assert gguf_types.check_numbers(sources.home, file) > 0
    text = (ROOT / "LICENSE").read_text()
    windows = gguf_types.windows_of(smollm2(root), text, TOKENS)
    theirs = gguf_types.losses_of_llama(sources.home, file, windows)
    ours = asyncio.run(gguf_types.losses_of_penstock(file, windows))
    assert perplexity(ours) / perplexity(theirs) == pytest.approx(1, abs=MOST_CHANGE)
