"""Recorded steps: the same bits as a pass through Python, for every model and batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engine.attention.batch import ForwardBatch
from engine.kernels.numba.codes import has_instructions
from engine.kernels.numba.linear import has_kernel
from engine.runner import step_programs
from engine.runner.step_programs import StepPrograms
from tests.engine.models import (
    test_deepseek_v2,
    test_deepseek_v3,
    test_gemma2,
    test_gemma3,
    test_gemma4,
    test_gpt2,
    test_llama,
    test_mixtral,
    test_qwen3,
    test_qwen3_5,
    test_smollm3,
)
from tests.engine.models import test_nanochat as nanochat
from tests.support.adapters import random_adapter
from tests.support.driver import Driver, tiny_llama
from tests.support.golden import Case, Golden

pytestmark = pytest.mark.usefixtures("one_thread")
LATENT: dict[str, Any] = {  # sizes that the kernels for several experts and heads take
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
WIDE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 32}
CASES: dict[str, Case] = {
    "llama": test_llama.CASES[0],
    "qwen3": test_qwen3.CASE,
    "smollm3": test_smollm3.CASE,
    "mixtral": Case("experts", lambda: test_mixtral.config(hidden_size=64, intermediate_size=64)),
    "gemma2": test_gemma2.CASE,
    "gemma3": test_gemma3.CASE,
    "gemma4": test_gemma4.E2B,
    "gpt2": test_gpt2.CASES[0],
    "nanochat": nanochat.CASES[-1],
    "deepseek2": Case("dense", lambda: test_deepseek_v2.config(first_k_dense_replace=2, **LATENT)),
    "deepseek3": Case("latent", lambda: test_deepseek_v3.config(**LATENT)),
}
SLOW = {"deepseek2": pytest.mark.slow}
SMALL: dict[str, Any] = {"block_size": 16, "max_num_seqs": 12, "speculation": "off"}


def answers(driver: Driver, count: int) -> list[Any]:
    """Return tokens and logprobs of requests of different lengths that start at different times."""
    ids = []
    for number in range(count):
        prompt = [3 + number % 5, 5, 7] * (1 + number)
        ids.append(driver.submit(prompt, 20 + number, temperature=0.8, seed=number, logprobs=1))
        driver.turn()
    driver.run()
    return [(driver.tokens(request), driver.logprobs(request)) for request in ids]


def programs(driver: Driver) -> dict[int, Any]:
    """Return what was recorded, by number of rows; None for what cannot be replayed."""
    found = driver.runner.programs
    assert isinstance(found, StepPrograms)
    return {shape.rows: program for shape, program in found._programs.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, ())) for n in CASES])
@pytest.mark.variants(2)
def test_recorded_decodes_equal_python(name: str, dtype: str, tmp_path: Path) -> None:
    """Sequences come and go, fill blocks and share them."""
    folder = Golden(CASES[name], tmp_path).folder
    found = Driver(folder, dtype=dtype, **SMALL)
    due = Driver(folder, dtype=dtype, **SMALL)
    due.runner.programs = None
    assert answers(found, 10) == answers(due, 10)
    recorded = programs(found)
    assert recorded.keys() >= set(range(1, 11))
    has_experts = name in ("mixtral", "deepseek3")
    if has_experts and dtype == "float32":  # the host reads the experts' counts
        assert not any(recorded.values())
    elif has_experts or name in ("llama", "gemma2", "gemma4", "qwen3", "smollm3", "deepseek2"):
        assert all(recorded.values()), "nothing was replayed"


# ---- steps with prompt chunks ----------------------------------------------------------------


class Replayed(NamedTuple):
    """The composition of a step that was replayed."""

    rows: int
    tokens: int  # less than the rows if some are padding
    counts: tuple[int, ...]  # new tokens of each sequence


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """Return the steps that programs compute."""
    steps: list[Replayed] = []
    compute = step_programs.StepProgram.__call__

    def noting(self: step_programs.StepProgram, batch: ForwardBatch) -> torch.Tensor:
        counts = tuple(batch.plan.layout.query_lens or ())
        steps.append(Replayed(self.batch.num_tokens, batch.num_tokens, counts))
        return compute(self, batch)

    monkeypatch.setattr(step_programs.StepProgram, "__call__", noting)
    return steps


def traffic(driver: Driver, seed: int) -> list[Any]:
    """Return the answers to requests of many lengths. Some are aborted while they run."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 200) for _ in range(48)]
    ids = []
    for number in range(28):
        own = [rng.randrange(3, 200) for _ in range(rng.choice((1, 7, 20, 45)))]
        prompt = shared[: rng.choice((0, 16, 33, 48))] + own
        options: dict[str, Any] = {"temperature": 0.8, "seed": number, "logprobs": 1}
        ids.append(driver.submit(prompt, rng.randrange(1, 32), **options))
        driver.turn(rng.randrange(3))
        if rng.random() < 0.2:
            driver.abort(rng.choice(ids))
    driver.run()
    return [(driver.tokens(request), driver.logprobs(request)) for request in ids]


# A small budget makes full steps common.
BUSY: dict[str, Any] = {
    "block_size": 16,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 40,
    "max_model_len": 128,
    "speculation": "off",
}
MIXED = ("llama", "gemma2", "gemma3", "gemma4", "mixtral", "deepseek2", "deepseek3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, ())) for n in MIXED])
@pytest.mark.variants(1)
def test_recorded_chunks_equal_python(
    name: str, dtype: str, tmp_path: Path, replayed: list[Replayed]
) -> None:
    """Prompts are cut, share prefixes, are preempted and aborted; some layers have windows."""
    folder = Golden(CASES[name], tmp_path).folder
    # Few blocks make the scheduler preempt. Layers with windows have blocks of their own.
    blocks = 44 if name.startswith("gemma") else 12
    found, due = (
        Driver(folder, dtype=dtype, num_gpu_blocks_override=blocks, **BUSY) for _ in range(2)
    )
    due.runner.programs = None
    for seed in (0, 1):
        assert traffic(found, seed) == traffic(due, seed)
    assert found.stats.preemptions == due.stats.preemptions > 0
    if name in ("mixtral", "deepseek3") and dtype == "float32":  # the host reads experts' counts
        assert not replayed
        return
    assert isinstance(found.runner.programs, StepPrograms)
    assert found.runner.programs._arena.num_bytes <= found.loaded.plan.program_bytes
    mixed = [step for step in replayed if 1 in step.counts and max(step.counts) > 1]
    assert len({step.counts for step in mixed if step.rows == 40}) > 5, "one composition"
    assert any(len(step.counts) == 1 for step in replayed), "no chunk alone"
    assert any(step.tokens < step.rows for step in replayed), "no padding"


@pytest.mark.skipif(not has_instructions(), reason="this CPU has no kernel for codes")
@pytest.mark.variants(1)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_decodes_with_quantized_weights_are_recorded(kind: str, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", hidden_size=64, intermediate_size=96)
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": kind, **SMALL}
    found, due = Driver(folder, **options), Driver(folder, **options)
    due.runner.programs = None
    assert answers(found, 3) == answers(due, 3)
    assert all(programs(found).values()), "nothing was replayed"


@pytest.mark.skipif(not has_kernel(torch.bfloat16), reason="this CPU has no AVX512_BF16")
@pytest.mark.parametrize("family", [test_llama, test_qwen3, test_qwen3_5])
def test_threads_of_a_recorded_decode_never_wait_for_torch(family: Any, tmp_path: Path) -> None:
    """Torch takes part before the first kernel only, to find the tokens' embeddings and angles.

    The threads wait for each call between two kernels.
    """
    sizes = WIDE | ({"linear_key_head_dim": 32} if family is test_qwen3_5 else {})
    case = Case("wide", lambda: family.config(**sizes))
    driver = Driver(Golden(case, tmp_path).folder, dtype="bfloat16", **SMALL)
    answers(driver, 2)
    assert programs(driver)
    for program in programs(driver).values():
        assert program is not None
        assert not [call for call in program.replay._calls if call.launches]


@pytest.mark.skipif(not has_kernel(torch.bfloat16), reason="this CPU has no AVX512_BF16")
def test_decodes_with_adapters_are_recorded(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", hidden_size=64, intermediate_size=96)
    modules = [f"a{n}={random_adapter(tmp_path / f'a{n}', folder, seed=n)}" for n in (1, 2, 3)]
    options: dict[str, Any] = {"lora_modules": tuple(modules), "max_loras": 2, **SMALL}
    found, due = (Driver(folder, dtype="bfloat16", **options) for _ in range(2))
    due.runner.programs = None

    def logprobs(driver: Driver) -> list[list[float]]:
        """Adapters leave their slots while other requests use the recorded passes."""
        ids = [driver.submit([5, 7, 9 + n], 24, adapter=n % 4, logprobs=0) for n in range(8)]
        driver.run()
        return [driver.logprobs(request) for request in ids]

    for _ in range(2):
        assert logprobs(found) == logprobs(due)
    assert isinstance(found.runner.programs, StepPrograms)
    recorded = found.runner.programs._programs
    assert any(shape.has_adapters for shape in recorded)
    assert all(recorded.values()), "nothing was replayed"


def test_contended_threads_compute_in_python(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program's threads spin while they wait. Other programs would lose their cores to them."""
    driver = Driver(checkpoint, **SMALL)
    assert isinstance(driver.runner.programs, StepPrograms)
    driver.runner.programs._programs.clear()
    # On a busy machine a poll between the steps would end the contention that the test sets. The
    # runner keeps the bound method.
    monkeypatch.setattr(driver.runner, "_poll", lambda now: None)
    wait = driver.runner.programs._openmp_wait
    wait.contended = True
    answers(driver, 2)
    assert not driver.runner.programs._programs
    wait.contended = False
    answers(driver, 2)
    assert driver.runner.programs._programs


def test_other_backends_and_kinds_record_nothing(checkpoint: Path) -> None:
    assert Driver(checkpoint, attention_backend="torch").runner.programs is None


# ---- what is recorded, and what is kept ------------------------------------------------------


def recorded_at(driver: Driver) -> list[int]:
    """Return the rows of each step that is recorded from now on."""
    steps: list[int] = []
    found = driver.runner.programs
    assert isinstance(found, StepPrograms)
    record = found._record

    def noting(shape: step_programs.Shape, batch: ForwardBatch) -> torch.Tensor:
        steps.append(shape.rows)
        return record(shape, batch)

    found._record = noting  # type: ignore[method-assign]
    return steps


def prompts(driver: Driver, *lengths: int) -> None:
    """Compute prompts of these lengths one after another, with no more than their first token."""
    for number, length in enumerate(lengths):
        driver.submit([3 + number] * length, 1)
        driver.run()


def test_shape_is_recorded_when_it_comes_again(checkpoint: Path) -> None:
    driver = Driver(checkpoint, **SMALL)
    steps = recorded_at(driver)
    prompts(driver, 5, 6, 7)
    assert steps == []
    prompts(driver, 6, 6, 5)
    assert steps == [6, 5]


def test_long_steps_are_not_recorded(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", max_position_embeddings=512)
    driver = Driver(folder, max_num_batched_tokens=300, **SMALL)
    steps = recorded_at(driver)
    prompts(driver, 260, 260, 260, 250, 250)
    assert steps == [256], "counts are rounded up to a multiple of 8"


def test_the_program_that_is_longest_unused_is_forgotten(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_programs, "PROGRAMS", 3)
    driver = Driver(checkpoint, **SMALL)
    prompts(driver, 2, 2, 3, 3, 4, 4, 2, 5, 5)
    assert list(programs(driver)) == [4, 2, 5]
    prompts(driver, 3)
    assert list(programs(driver)) == [4, 2, 5], "its steps are counted from 0 again"
    prompts(driver, 3)
    assert list(programs(driver)) == [2, 5, 3]


def test_layer_that_keeps_a_tensor_is_not_recorded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of an arena that such a tensor is in would overwrite it, so they are forgotten."""
    driver = Driver(checkpoint, **SMALL)
    prompts(driver, 2, 2)
    assert programs(driver)[2]
    forward = driver.runner.forward._model.forward
    kept: list[torch.Tensor] = []

    def keeping(batch: ForwardBatch) -> torch.Tensor:
        kept.append(torch.arange(4) + 1)
        return forward(batch)

    monkeypatch.setattr(driver.runner.forward._model, "forward", keeping)
    prompts(driver, 3, 3)
    assert programs(driver) == {3: None}
    prompts(driver, 2, 2, 2)
    assert programs(driver) == {3: None, 2: None}
    assert all(torch.equal(each, torch.arange(4) + 1) for each in kept)
