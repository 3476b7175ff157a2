"""A model that does not fit is refused before anything is loaded, as `--plan` refuses it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from engine.device.openmp_wait import OpenMPWait
from engine.errors import ConfigError
from engine.memory.model_plan import ModelPlan
from engine.memory.report import plan_memory
from engine.runner.load import load_engine


def test_load_refuses_what_the_plan_refuses_before_weights_are_loaded() -> None:
    stages: list[str] = []
    config = EngineConfig(model="demo", max_model_len=512, num_gpu_blocks_override=1, threads=1)
    with pytest.raises(ConfigError) as planned:
        plan_memory(ModelPlan(config))
    with pytest.raises(ConfigError) as refused:
        load_engine(config, lambda progress: stages.append(progress.stage))
    assert str(refused.value) == str(planned.value)
    assert stages == []


def test_threads_sleep_while_weights_are_loaded_and_spin_again_in_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def asleep(self: OpenMPWait) -> Iterator[None]:
        events.append("asleep")
        yield
        events.append("awake")

    monkeypatch.setattr(OpenMPWait, "asleep", asleep)
    config = EngineConfig(model="demo", max_model_len=64, num_gpu_blocks_override=8, threads=1)
    load_engine(config, lambda progress: events.append(progress.stage))
    loading = [event for event in events if not event.startswith("compiling")]
    assert list(dict.fromkeys(loading)) == [
        "asleep",
        "loading weights",
        "awake",
        "allocating the KV cache",
        "warming up",
    ]
