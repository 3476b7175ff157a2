"""TokenEmbedding requests in the scheduler: order, budgets, limits, aborts and NaN."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.protocol.outputs import StepOutputs
from tests.support.driver import EAGER, Driver, each
from tests.support.tiny_bert import tiny_bert

pytestmark = pytest.mark.usefixtures("one_thread")
modes = pytest.mark.parametrize("mode", each(EAGER))
LONGEST = 96
HOT = 299  # a token that occurs only in texts with NaN


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("checkpoints") / "tiny-bert")


def texts(count: int, longest: int = LONGEST) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(HOT) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def steps_of(driver: Driver) -> list[list[int]]:
    """Return a list that receives the request ids of each later step."""
    steps: list[list[int]] = []
    launch = driver.runner.launch

    def noting(step: Any) -> Any:
        steps.append([encode.id for encode in step.encoder_inputs])
        return launch(step)

    driver.runner.launch = noting  # type: ignore[method-assign]
    return steps


@modes
def test_embed_in_batch_equals_alone_bitwise(bert: Path, mode: dict[str, Any]) -> None:
    driver = Driver(bert, block_size=16, max_num_encoder_tokens=400, **mode)
    crowd = texts(32)
    ids = [driver.embed(text) for text in crowd]
    driver.run()
    for number, text in zip(ids, crowd, strict=True):
        alone = driver.embed(text)
        driver.run()
        assert torch.equal(driver.vector(alone), driver.vector(number))
    assert len({driver.embeddings[i].vector for i in ids}) == len(ids)


@modes
def test_embed_schedules_whole_texts_within_budget_and_longer_text_alone(
    bert: Path, mode: dict[str, Any]
) -> None:
    driver = Driver(bert, max_num_encoder_tokens=40, **mode)
    steps = steps_of(driver)
    ids = [driver.embed([5] * length) for length in (10, 20, 11, 41, 1, 39, 96)]
    driver.run()
    due = [[4, 0, 2], [1], [5], [3], [6]]  # by length: all arrive together
    assert steps == [[ids[place] for place in step] for step in due]
    assert all(driver.embeddings[i].finish == "stop" for i in ids)
    told = [m.stats for m in driver.sent if isinstance(m, StepOutputs) and m.embeddings]
    assert [s.step_prefill_tokens for s in told] == [22, 20, 39, 41, 96]
    assert not any(s.step_decode_tokens for s in told)


@pytest.mark.parametrize("prepack", [True, False])
def test_embed_large_step_is_padded_to_multiple_of_16_rows(bert: Path, prepack: bool) -> None:
    """Otherwise oneDNN compiles a kernel for nearly every step and evicts it before its reuse."""
    if prepack and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    driver = Driver(bert, max_num_encoder_tokens=400, prepack=prepack)
    encode, rows = driver.runner.model.encode, []

    def noting(batch: Any) -> torch.Tensor:
        rows.append((batch.num_tokens, len(batch.input_ids)))
        hidden = encode(batch)
        assert len(hidden) == len(batch.input_ids)
        return hidden

    driver.runner.model.encode = noting  # type: ignore[method-assign]
    for lengths in ([7], [20, 12], [33], [90, 70], [90, 71]):
        for length in lengths:
            driver.embed([5] * length)
        driver.run()
    many = [33, 160, 161]
    assert rows == [(7, 7), (32, 32), *zip(many, [48, 160, 176] if prepack else many, strict=True)]


@modes
def test_embed_lower_priority_value_runs_first(bert: Path, mode: dict[str, Any]) -> None:
    driver = Driver(bert, max_num_encoder_tokens=10, **mode)
    steps = steps_of(driver)
    priorities = (3, 0, 3, -1, 0)
    ids = [driver.embed([7] * 10, priority=priority) for priority in priorities]
    driver.run()
    assert steps == [[ids[i]] for i in (3, 1, 4, 0, 2)]


@modes
def test_embed_empty_or_too_long_text_is_rejected_alone(bert: Path, mode: dict[str, Any]) -> None:
    driver = Driver(bert, **mode)
    empty, long, fits = (driver.embed([3] * n) for n in (0, LONGEST + 1, LONGEST))
    driver.run()
    for number, length in ((empty, 0), (long, LONGEST + 1)):
        assert driver.rejected[number].code == "context_length_exceeded"
        assert f"{length} tokens" in driver.rejected[number].message
        assert str(LONGEST) in driver.rejected[number].message
    assert driver.embeddings.keys() == {fits}
    assert driver.rejected.keys() == {empty, long}


@modes
def test_embed_abort_while_waiting_skips_text(bert: Path, mode: dict[str, Any]) -> None:
    driver = Driver(bert, max_num_encoder_tokens=10, **mode)
    steps = steps_of(driver)
    ids = [driver.embed([7] * 10) for _ in range(4)]
    driver.turn()
    driver.abort(ids[2], ids[3], 10**9)
    driver.run()
    assert steps == [[ids[0]], [ids[1]]]
    assert driver.embeddings.keys() == set(ids[:2])


def test_embed_abort_in_flight_drops_vector(bert: Path) -> None:
    driver = Driver(bert, **EAGER["late"])
    gone, kept = driver.embed([7] * 10), driver.embed([8] * 10)
    driver.turn()
    assert driver.core.in_flight
    driver.abort(gone)
    driver.run()
    assert driver.embeddings.keys() == {kept}


@modes
def test_embed_nan_fails_one_text_and_leaves_others_unchanged(
    bert: Path, mode: dict[str, Any]
) -> None:
    driver = Driver(bert, **mode)
    crowd = texts(6, 30)
    before = [driver.embed(text) for text in crowd]
    driver.run()
    driver.runner.model.embed.weight.data[HOT] = float("nan")  # type: ignore[attr-defined]
    ids, broken = [], []
    for text in crowd:
        broken.append(driver.embed([*text, HOT]))
        ids.append(driver.embed(text))
    driver.run()
    assert {driver.embeddings[i].finish for i in broken} == {"error"}
    for new, old in zip(ids, before, strict=True):
        assert driver.embeddings[new].finish == "stop"
        assert torch.equal(driver.vector(new), driver.vector(old))


def test_encoder_with_kv_cache_settings_allocates_no_blocks(bert: Path) -> None:
    driver = Driver(bert, kv_cache_memory_bytes=1, max_model_len=50)
    facts = driver.core.facts
    assert (facts.kind, facts.num_blocks, facts.kv_cache_bytes) == ("encoder", 0, 0)
    assert (facts.kv_groups, facts.max_model_len) == ((), 50)
