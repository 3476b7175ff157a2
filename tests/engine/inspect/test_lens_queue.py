"""Lenses between the steps of requests: which tokens stay the same, and which request waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.attention import weights_size
from engine.inspect import lens_queue
from engine.inspect.lens import look
from engine.ops.kernels import use_kernels
from engine.protocol.lens import MAX_LENS_BYTES, LensRequest, LensResult
from engine.protocol.outputs import StepOutputs
from engine.protocol.wire import FromEngine, ToEngine
from engine.vision.requests import ImageRequests
from tests.support.driver import MODES, Driver, each, tiny_llama
from tests.support.lens import run_lens
from tests.support.tiny_bert import tiny_bert

modes = pytest.mark.parametrize("mode", each(MODES))
PROMPTS = [[5, 6, 7, 8], list(range(40)), [9] * 17]


def results(driver: Driver) -> list[LensResult]:
    return [message for message in driver.sent if isinstance(message, LensResult)]


def ask(driver: Driver, lens_id: int = 900, **fields: Any) -> None:
    driver.inbox.append(LensRequest(lens_id, **({"tokens": [1, 2, 3, 4, 5]} | fields)))


def lens_of_idle_engine(driver: Driver, **fields: Any) -> LensResult:
    ask(driver, **fields)
    while not results(driver):
        driver.turn()
    (result,) = results(driver)
    return result


@modes
def test_lens_changes_no_token_and_no_logprob_of_requests(
    checkpoint: Path, mode: dict[str, Any]
) -> None:
    def answers(*, looks: bool) -> list[Any]:
        driver = Driver(checkpoint, **mode, block_size=16)
        sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3, "logprobs": 0}
        ids = [driver.submit(prompt, 20, **sampled) for prompt in PROMPTS]
        turns = 0
        while driver.busy or driver.inspectors.lenses:
            if looks and turns % 4 == 2 and turns < 40:
                ask(driver, 900 + turns, positions=(0, 3))
            driver.turn()
            turns += 1
            assert turns < 1000
        found = results(driver)
        assert not any(result.error for result in found)
        assert len(found) >= 5 if looks else not found
        for result in found[1:]:
            assert msgspec.structs.replace(result, id=0) == msgspec.structs.replace(found[0], id=0)
        return [[driver.tokens(i), driver.logprobs(i)] for i in ids]

    assert answers(looks=True) == answers(looks=False)


@modes
def test_lens_leaves_the_bytes_of_the_cache_and_of_the_rows(
    checkpoint: Path, mode: dict[str, Any]
) -> None:
    driver = Driver(checkpoint, **mode, block_size=16)
    first = driver.submit(PROMPTS[1], 4)
    driver.run()
    runner = driver.runner
    tensors = [part for kv in runner.kv.layers for part in (kv.keys, kv.values)]
    tensors += [runner.rows.tokens, runner.rows.block_tables]
    before = [tensor.clone() for tensor in tensors]
    assert any(tensor.any() for tensor in before)
    stats = driver.core.stats()
    assert lens_of_idle_engine(driver, tokens=PROMPTS[1]).attention
    assert all(map(torch.equal, tensors, before))
    assert driver.core.stats() == stats
    again = driver.submit(PROMPTS[1], 4)
    driver.run()
    assert driver.cached_tokens(again) == 32
    assert driver.tokens(again) == driver.tokens(first)


def test_lens_waits_while_a_request_waits_and_runs_between_steps(checkpoint: Path) -> None:
    driver = Driver(checkpoint, max_num_seqs=1)
    driver.submit([1, 2], 6)
    driver.submit([3, 4], 6)
    driver.turn()
    ask(driver)
    while driver.core.scheduler.waiting:
        assert not results(driver)
        driver.turn()
    assert driver.core.scheduler.running, "the second request still runs"
    while not results(driver):
        driver.turn()
    assert driver.core.scheduler.running, "the lens did not wait for its end"
    steps = [message for message in driver.sent if isinstance(message, StepOutputs)]
    assert len(steps) >= 7
    driver.run()


def test_lens_waits_while_images_of_a_request_are_encoded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(checkpoint)
    images = driver.inspectors._images
    assert isinstance(images, ImageRequests)
    monkeypatch.setattr(ImageRequests, "has_work", True)
    ask(driver)
    driver.turn(20)
    assert not results(driver)
    monkeypatch.setattr(ImageRequests, "has_work", False)
    while not results(driver):
        driver.turn()


def test_lens_is_computed_in_pieces_with_a_step_after_each(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    driver.submit([1, 2], 30)
    driver.turn(2)
    ask(driver, positions=(0, 4))
    before = len(driver.sent)
    while not results(driver):
        driver.turn()
    steps = [m for m in driver.sent[before:] if isinstance(m, StepOutputs) and m.tokens]
    # The pass, all predictions, and the logit lens before the layers and between the two.
    assert len(steps) == 4
    driver.run()


def test_lens_of_an_idle_engine_sends_a_sign_of_life_with_each_long_piece(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with work that sends nothing for --stall-timeout is killed as hung."""
    monkeypatch.setattr("engine.core.SIGN_S", 0.0)
    driver = Driver(checkpoint)
    ask(driver, positions=(0, 4))
    turns = 0
    while not results(driver):
        before = len(driver.sent)
        driver.turn()
        turns += 1
        assert len(driver.sent) > before
    assert turns == 4


def test_lens_is_refused_when_requests_wait_too_long(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(checkpoint, max_num_seqs=1)
    now = 100.0
    monkeypatch.setattr(lens_queue.time, "monotonic", lambda: now)
    driver.submit([1, 2], 40)
    driver.submit([3, 4], 4)
    driver.turn()
    ask(driver)
    driver.turn(2)
    now = 109.9
    driver.turn()
    assert not results(driver)
    now = 110.1
    driver.turn()
    (refused,) = results(driver)
    assert refused == LensResult(900, error="busy")
    assert not driver.inspectors.lenses
    monkeypatch.undo()
    driver.run()


def test_aborted_lens_is_dropped_and_the_next_one_is_computed(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    ask(driver, 901)
    ask(driver, 902, tokens=[7, 8])
    ask(driver, 903)
    driver.abort(903)
    driver.turn()  # the first piece of the first one
    driver.abort(901, 5555)
    while driver.inspectors.lenses:
        driver.turn()
    (result,) = results(driver)
    assert result.id == 902
    assert len(result.predictions) == 2


def test_failing_lens_is_reported_and_requests_go_on(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(checkpoint)
    request = driver.submit([1, 2], 10)
    driver.turn()

    def failing(_: LensRequest) -> Iterator[None]:
        yield None
        raise RuntimeError("secret")

    look = driver.inspectors.lenses.look
    driver.inspectors.lenses.look = failing
    ask(driver, 901)
    driver.run()
    assert results(driver) == [LensResult(901, error="failed")]
    assert "secret" in caplog.text
    assert len(driver.tokens(request)) == 10
    driver.inspectors.lenses.look = look
    ask(driver, 902)
    while driver.inspectors.lenses or driver.inbox:
        driver.turn()
    assert results(driver)[1].attention


def test_lens_out_of_range_fails_and_the_model_is_restored(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    assert lens_of_idle_engine(driver, tokens=[1, 2], positions=(7,)).error == "failed"
    module: Any = driver.runner.model
    assert not any("add" in vars(layer) for layer in module.modules())
    kernels = {layer.kernels for layer in module.modules() if hasattr(layer, "kernels")}
    assert kernels == {driver.runner.rows.kernels}


def test_lens_of_a_model_with_triton_kernels_computes_with_torch(checkpoint: Path) -> None:
    """A Triton kernel would fail without a GPU, and one of them writes to the cache."""
    driver = Driver(checkpoint)
    expected = lens_of_idle_engine(driver, positions=(1,))
    module: Any = driver.runner.model
    driver.runner.rows.kernels = "triton"
    use_kernels(module, "triton")
    driver.sent.clear()
    assert lens_of_idle_engine(driver, positions=(1,)) == expected
    kernels = {layer.kernels for layer in module.modules() if hasattr(layer, "kernels")}
    assert kernels == {"triton"}


def test_lens_of_an_encoder_waits_for_texts(tmp_path: Path) -> None:
    driver = Driver(tiny_bert(tmp_path), max_num_encoder_tokens=4)
    texts = [driver.embed([1, 2, 3, 4]) for _ in range(3)]
    ask(driver)
    driver.turn(2)
    assert not results(driver)
    driver.run()
    while driver.inspectors.lenses:
        driver.turn()
    (result,) = results(driver)
    assert [layer.stack for layer in result.attention] == ["encoder"] * 2
    assert all(driver.finish(text) is None for text in texts)
    assert len(driver.embeddings) == 3


def test_max_lens_tokens_is_the_longest_text_of_whose_weights_a_layer_fits(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 256, "num_key_value_heads": 1}
    long = {"max_position_embeddings": 4096}
    small = Driver(tiny_llama(tmp_path / "small", **long))
    assert small.loaded.facts.max_lens_tokens == 1024
    wide = Driver(tiny_llama(tmp_path / "wide", num_hidden_layers=2, **sizes, **long))
    longest = wide.loaded.facts.max_lens_tokens
    pairs = [n * (n + 1) // 2 * 256 * 4 for n in (longest, longest + 1)]
    assert pairs[0] <= MAX_LENS_BYTES < pairs[1]


def test_weights_of_a_long_text_are_kept_one_layer_at_a_time(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(checkpoint)
    heads = driver.loaded.facts.ablatable_heads[0]
    one = 40 * 41 // 2 * heads * 4
    monkeypatch.setattr(weights_size, "MAX_TOGETHER_BYTES", 2 * one - 1)
    monkeypatch.setattr(weights_size, "MAX_LENS_BYTES", one)
    tokens = list(range(40))

    def kept(**more: Any) -> list[int]:
        result = run_lens(driver.runner, tokens, **more)
        assert all(layer.summary is not None for layer in result.attention)
        return [len(layer.weights) for layer in result.attention]

    assert kept() == [0, 0]
    assert kept(layers=(1,)) == [0, one]
    together = LensRequest(7, tokens, layers=(0, 1))
    *_, result = look(driver.runner, together)
    assert result is not None
    assert (result.error, result.attention) == ("large", [])
    assert driver.runner.model is not None
    whole = run_lens(driver.runner, tokens[:20])
    assert all(layer.weights for layer in whole.attention)


def test_lens_messages_survive_the_channel(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    request = LensRequest(3, [1, 2, 3], [4], (0, 2), 5, attention=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=ToEngine) == request
    result = lens_of_idle_engine(driver, positions=(1,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=FromEngine) == result


def test_lens_takes_no_text_longer_than_the_context(checkpoint: Path) -> None:
    assert Driver(checkpoint, max_model_len=64).core.facts.max_lens_tokens == 64
