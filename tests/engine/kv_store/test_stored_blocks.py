"""Blocks in files give the same answers as computed ones, also if files are damaged."""

from __future__ import annotations

import ast
import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.checkpoint import identity
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_store import reads, saves, stored_blocks
from engine.kv_store.identity import check_model
from engine.kv_store.stored_blocks import StoredBlocks
from engine.protocol.generate import Ablation, Image
from tests.structure.measure import folder_files
from tests.support.adapters import random_adapter
from tests.support.damaged_blocks import block_files, damage
from tests.support.driver import Driver, part_of, tiny_llama
from tests.support.tiny_smolvlm import PER_TILE, TILE, write_seeing
from tests.support.tiny_windows import windowed_qwen2

PROMPT = list(range(100))  # 6 blocks and 4 tokens


class Starts:
    """Engines over one folder, one after another."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self._running: list[Driver] = []

    def __call__(self, **config: Any) -> Driver:
        """Stop the last engine, and start the next one."""
        self.stop()
        folder = str(self.folder)
        settings: dict[str, Any] = {"block_size": 16, "kv_cache_dir": folder} | config
        driver = Driver(self.model, **settings)
        self._running.append(driver)
        return driver

    def stop(self) -> None:
        while self._running:
            for part in self._running.pop().core.between:
                part.close()


@pytest.fixture
def start(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    monkeypatch.setattr(reads, "STALL_S", 600.0)  # a busy machine may stop this process for long
    monkeypatch.setattr(stored_blocks, "LONGEST_WAIT_S", 600.0)
    monkeypatch.setattr(stored_blocks, "END_S", 600.0)
    monkeypatch.setattr(saves, "SCAN_S", 600.0)
    starts = Starts(checkpoint, tmp_path / "kv")
    yield starts
    starts.stop()


def answered(driver: Driver, prompt: list[int] = PROMPT, **fields: Any) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many of the prompt were cached."""
    number = driver.submit(prompt, 8, **fields)
    driver.run()
    assert driver.finish(number) == "length"
    return driver.tokens(number), driver.cached_tokens(number)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"depth": 1},
        {"kv_cache_dtype": "int8"},
        {"attention_backend": "torch", "kv_cache_dtype": "fp8"},
        {"dtype": "bfloat16", "block_size": 32},
    ],
    ids=str,
)
def test_answer_after_a_restart_is_that_of_computed_blocks(
    start: Starts, config: dict[str, Any]
) -> None:
    answer, cached = answered(start(**config))
    assert cached == 0
    again = start(**config)
    assert answered(again) == (answer, 96)
    size = again.config.block_size
    assert again.stats.gauges["kv_store_hits"] == 96 // size
    assert again.stats.gauges["kv_store_misses"] == 0
    assert answered(again) == (answer, 96), "now they are in memory"
    assert again.stats.gauges["kv_store_hits"] == 96 // size


def test_answer_of_an_earlier_process_is_kept_too(start: Starts) -> None:
    driver = start()
    number = driver.submit(PROMPT, 40)
    driver.run()
    longer = [*PROMPT, *driver.tokens(number)]
    assert answered(start(), longer)[1] == 128


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return windowed_qwen2(tmp_path_factory.mktemp("windowed"))


def test_windowed_layers_bring_back_only_what_is_visible(windowed: Path, start: Starts) -> None:
    start.model = windowed
    driver = start()
    windows = [group.window for group in driver.core.facts.kv_groups]
    assert sorted(windows, key=str) == [20, 20, None]
    answer, _ = answered(driver)
    again = start()
    assert answered(again) == (answer, 96)
    assert again.stats.gauges["kv_store_hits"] == 6 + 2 * 2  # of a window the last two
    with_prefix = start()
    assert answered(with_prefix, PROMPT[:70])[1] == 64


def test_damaged_files_never_change_an_answer(start: Starts, tmp_path: Path) -> None:
    prompts = [[number, *PROMPT[:80]] for number in range(12)]
    driver = start()
    expected = [answered(driver, prompt)[0] for prompt in prompts]
    start.folder = tmp_path / "other key"
    driver = start()
    for prompt in prompts:
        answered(driver, prompt)
    foreign = [file.read_bytes() for file in block_files(start.folder)]
    start.folder = tmp_path / "kv"
    start.stop()
    assert damage(start.folder, foreign, 1, share=0.5) == 30
    driver = start()
    assert [answered(driver, prompt)[0] for prompt in prompts] == expected
    errors = {name: count for name, count in driver.stats.gauges.items() if "errors" in name}
    assert sum(errors.values()) >= 20, errors
    assert driver.stats.gauges["kv_store_hits"] > 5


def test_requests_of_other_salts_find_nothing(start: Starts) -> None:
    answer, _ = answered(start(), salt="a")
    again = start()
    assert answered(again, salt="b") == (answer, 0)
    assert answered(again) == (answer, 0)
    assert answered(again, salt="a") == (answer, 96)


def test_files_of_another_model_are_not_used(start: Starts, tmp_path: Path) -> None:
    answered(start())
    start.model = tiny_llama(tmp_path / "other", seed=1)
    other = start()
    answer, cached = answered(other)
    assert cached == 0
    assert other.stats.gauges["kv_store_hits"] == 0
    assert answered(start()) == (answer, 96)


def test_weights_edited_in_place_are_those_of_another_model(
    start: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity that a start prints is that of a sample, which need not have the edit."""
    monkeypatch.setattr(identity, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(identity, "SAMPLE_BYTES", 4 << 10)
    start.model = tiny_llama(tmp_path / "edited")
    driver = start()
    before = driver.core.facts.weights
    answer, _ = answered(driver)
    file = start.model / "model.safetensors"
    weights, facts = load_file(file), file.stat()
    weights["model.layers.0.input_layernorm.weight"][3] = 9.0
    save_file(weights, file)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    edited = start()
    assert (file.stat().st_size, edited.core.facts.weights) == (facts.st_size, before)
    other, cached = answered(edited)
    assert cached == 0
    assert other != answer


def test_image_settings_are_part_of_the_model(
    start: Starts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The engine scales pixels by them, so the embeddings of the same image differ."""
    start.model = write_seeing(tmp_path_factory.mktemp("seeing") / "smolvlm")
    pixels = bytes(number % 251 for number in range(3 * TILE**2))
    shown = Image(bytes(16), ((3, PER_TILE),), pixels, (1, TILE, TILE))
    answered(start(), PROMPT[10:60], images=[shown])
    file = start.model / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"image_mean": [0.1, 0.9, 0.2]}))
    assert answered(start(), PROMPT[10:60], images=[shown])[1] == 0


def test_settings_that_change_bytes_have_blocks_of_their_own(start: Starts) -> None:
    answered(start())
    assert answered(start(kv_cache_dtype="int8"))[1] == 0
    assert answered(start(block_size=32))[1] == 0
    assert answered(start(max_num_seqs=3, num_gpu_blocks_override=40))[1] == 96


def test_image_is_part_of_what_is_found(
    start: Starts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    start.model = write_seeing(tmp_path_factory.mktemp("seeing") / "smolvlm")
    shown, other = (
        Image(bytes([seed]) * 16, ((3, PER_TILE),), bytes([seed]) * (3 * TILE**2), (1, TILE, TILE))
        for seed in (1, 2)
    )
    answer, _ = answered(start(), PROMPT[10:60], images=[shown])
    again = start()
    assert answered(again, PROMPT[10:60], images=[other])[1] == 0
    assert answered(again, PROMPT[10:60], images=[shown]) == (answer, 48)


def test_request_of_an_adapter_leaves_no_files(start: Starts, tmp_path: Path) -> None:
    adapter = random_adapter(tmp_path / "adapter", start.model, seed=1)
    settings = {"lora_modules": (f"a={adapter}",)}
    answered(start(**settings), adapter=1)
    assert block_files(start.folder) == []
    base, _ = answered(start(**settings))
    again = start(**settings)
    assert answered(again, adapter=1)[1] == 0
    assert answered(again) == (base, 96)


def test_ablated_request_leaves_no_files(start: Starts) -> None:
    answered(start(), ablation=Ablation(layers=(1,)))
    assert block_files(start.folder) == []


def test_failed_request_leaves_no_files(start: Starts) -> None:
    driver = start(max_num_batched_tokens=32)
    number = driver.submit(PROMPT, 8)
    driver.poisoned.add(number)
    driver.run()
    assert driver.finish(number) == "error"
    start.stop()
    assert block_files(start.folder) == []


def test_many_requests_after_a_restart_in_a_small_pool(start: Starts) -> None:
    """Blocks that are brought back do not evict each other, nor do they stop others."""
    prompts = [[number, *PROMPT[:80]] for number in range(8)]
    driver = start()
    expected = [answered(driver, prompt)[0] for prompt in prompts]
    again = start(num_gpu_blocks_override=20, max_num_seqs=2)
    numbers = [again.submit(prompt, 8, priority=-index) for index, prompt in enumerate(prompts)]
    again.run()
    assert [again.tokens(number) for number in numbers] == expected
    assert [again.cached_tokens(number) for number in numbers] == [80] * 8


class SlowDisk:
    """A reader that waits before each block until it may go on."""

    def __init__(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        files = part_of(driver.core, StoredBlocks)._files
        read = files.read

        def slow_read(key: bytes) -> memoryview | None:
            self.may_go_on.wait(20)
            return read(key)

        monkeypatch.setattr(files, "read", slow_read)


def test_request_waits_for_the_disk_while_others_run_and_can_be_aborted(
    start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, _ = answered(start())
    again = start()
    disk = SlowDisk(again, monkeypatch)
    waiting, aborted = again.submit(PROMPT, 8), again.submit(PROMPT, 8)
    other = again.submit([7] * 20, 8)
    again.turn(12)
    assert again.finish(other) == "length"
    assert again.outputs.keys() == {other}
    again.abort(aborted)
    again.turn(2)
    disk.may_go_on.set()
    again.run()
    assert (again.tokens(waiting), again.cached_tokens(waiting)) == (answer, 96)
    assert aborted not in again.outputs


def test_disk_that_hangs_delays_a_request_only_for_a_moment(
    start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, _ = answered(start())
    again = start()
    disk = SlowDisk(again, monkeypatch)
    monkeypatch.setattr(reads, "STALL_S", 0.05)
    began = time.monotonic()
    assert answered(again) == (answer, 0)
    assert answered(again, PROMPT[:50])[1] == 48, "from memory"
    answered(again, [1, *PROMPT])
    assert time.monotonic() < began + 5
    disk.may_go_on.set()


def test_blocks_wait_in_the_pool_while_the_writer_is_busy(
    start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "WRITING_BYTES", 1)  # one block at a time
    driver = start()
    answer, _ = answered(driver)
    assert driver.stats.gauges["kv_store_writes"] <= 6
    assert answered(start()) == (answer, 96)


def test_bytes_between_two_steps_are_bounded(
    start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, _ = answered(start())
    again = start()
    monkeypatch.setattr(stored_blocks, "COPIED_BYTES", 1)
    stream = again.submit([7] * 4, 60)
    again.turn(2)
    number = again.submit(PROMPT, 8)
    placed = []
    while number not in again.admissions:
        before = part_of(again.core, StoredBlocks).gauges()["kv_store_hits"]
        again.turn()
        placed.append(part_of(again.core, StoredBlocks).gauges()["kv_store_hits"] - before)
    assert max(placed) == 1
    assert sum(placed) == 6
    again.run()
    assert again.tokens(number) == answer
    assert again.finish(stream) == "length"


def test_failure_of_the_disk_is_reported_once(
    start: Starts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start()
    files = part_of(driver.core, StoredBlocks)._files

    def fail(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_write", fail)
    answer, _ = answered(driver)
    assert answered(driver, [1, *PROMPT])[1] == 0
    driver.turn(3)
    assert caplog.text.count("blocks cannot be written (No space left on device)") == 1
    start.stop()
    assert block_files(start.folder) == []
    assert answered(start()) == (answer, 0)


@pytest.mark.parametrize(
    ("kind", "states", "bound", "message"),
    [
        ("encoder", (), 10**9, "is for decoders; X is an encoder"),
        ("encoder-decoder", (), 10**9, "is for decoders; X is an encoder-decoder"),
        ("decoder", ("state",), 10**9, "X also has recurrent states"),
        ("decoder", (), 4095, "4095 is less than a block of this model takes: 4096 bytes"),
    ],
)
def test_model_whose_blocks_cannot_be_kept_is_refused(
    kind: str, states: tuple[str, ...], bound: int, message: str
) -> None:
    config = EngineConfig(kv_cache_dir_bytes=bound)
    plan: Any = SimpleNamespace(kind=kind, architecture="X", state_specs=states, config=config)
    with pytest.raises(ConfigError, match=message):
        check_model(plan, 4096)


def test_refusal_leaves_the_folder_free(start: Starts) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="is less than a block"):
            start(kv_cache_dir_bytes=1)
    answered(start())


def test_nothing_imports_the_store_before_the_flag_is_seen() -> None:
    """The rest of the engine imports it only inside functions, and for types."""
    for file in folder_files("engine"):
        if "kv_store" not in file.parts:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
            assert not [name for name in found if name and name.startswith("engine.kv_store")], file
