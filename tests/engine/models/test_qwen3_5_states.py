"""The states of gated delta nets: answers do not depend on where a prompt's states come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.layers.gated_delta_net import GatedDeltaNet
from engine.ops.codes import Quantization
from tests.engine.models.test_qwen3_5 import config
from tests.support.drafts import draft_from
from tests.support.driver import Driver
from tests.support.golden import of_transformers

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK, COUNT = 16, 8
SMALL: dict[str, Any] = {"block_size": BLOCK, "max_num_seqs": 4, "num_gpu_blocks_override": 40}
KINDS = ["linear_attention", "full_attention"]
PROMPT = [(7 * index * index + 3) % 211 for index in range(44)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("delta")
    of_transformers(
        config(hidden_size=64, vocab_size=640, num_hidden_layers=2, layer_types=KINDS), folder
    )
    return folder


@pytest.fixture(scope="module")
def cold(folder: Path) -> Driver:
    """Neither reuses prefixes nor drafts."""
    return Driver(folder, **SMALL, enable_prefix_caching=False, speculation="off")


def answer(driver: Driver, prompt: list[int], **params: Any) -> tuple[list[int], list[float]]:
    request = driver.submit(prompt, COUNT, logprobs=0, **params)
    driver.run()
    return driver.tokens(request), driver.logprobs(request)


@pytest.mark.parametrize("shared", [31, 32, 33, 40, 15])
def test_prefix_that_ends_at_and_between_block_edges_is_reused_exactly(
    folder: Path, cold: Driver, shared: int
) -> None:
    driver = Driver(folder, **SMALL)
    answer(driver, PROMPT)
    other = PROMPT[:shared] + [(token + 1) % 211 for token in PROMPT[shared:]]
    request = driver.submit(other, COUNT, logprobs=0)
    driver.run()
    assert driver.cached_tokens(request) == shared // BLOCK * BLOCK
    assert (driver.tokens(request), driver.logprobs(request)) == answer(cold, other)


def test_next_turn_reuses_the_states_of_the_answer(folder: Path, cold: Driver) -> None:
    driver = Driver(folder, **SMALL)
    tokens, _ = answer(driver, PROMPT)
    longer = [*PROMPT, *tokens, 5, 8, 13]
    request = driver.submit(longer, COUNT, logprobs=0)
    driver.run()
    assert driver.cached_tokens(request) == 48  # one more block than the prompt's
    assert (driver.tokens(request), driver.logprobs(request)) == answer(cold, longer)


@pytest.mark.parametrize("period", [1, 3, 99])
def test_drafts_with_a_wrong_token_now_and_then_change_no_answer(
    folder: Path, cold: Driver, period: int
) -> None:
    """A state cannot be cut back to the last accepted token; another slot has it."""
    driver = Driver(folder, **SMALL)
    due = answer(cold, PROMPT)
    drafted = [token if (i + 1) % period else token + 1 for i, token in enumerate(due[0])]
    draft_from(driver, lambda request: drafted, 0.0)
    found = answer(driver, PROMPT)
    assert found[0] == due[0]
    assert found[1] == pytest.approx(due[1], abs=1e-4)
    assert (driver.stats.drafted_right > 0) == (period > 1)
    assert (driver.stats.drafted_right < driver.stats.drafted) == (period < 99)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_delta_nets_answer_alone_as_together(folder: Path, kind: Quantization) -> None:
    driver = Driver(folder, **SMALL, dtype="bfloat16", quantization=kind)
    prompts = [PROMPT[first:] for first in (0, 15, 30)]
    alone = [answer(driver, prompt)[0] for prompt in prompts]
    together = [driver.submit(prompt, COUNT) for prompt in prompts]
    driver.run()
    assert [driver.tokens(request) for request in together] == alone
    module: Any = driver.runner.model
    layer = next(layer for layer in module.modules() if isinstance(layer, GatedDeltaNet))
    sizes = layer.inputs.tensors.packed_bytes, layer.rates.tensors.packed_bytes
    # Codes, unless the CPU lacks the instructions; decays are not rounded.
    codes = {"int8": 1.1, "int4": 0.7}[kind] * 64 * (32 + 64 + 64)
    assert sizes[0] <= codes or sizes[0] == 0
    assert sizes[1] in (0, 4 * 64 * 8)  # fp32, for the kernel of few outputs
