"""A step that does not fit because freed memory lies in pieces is computed again without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.driver import Driver, tiny_llama


def test_step_out_of_memory_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_llama(tmp_path)
    expected = answer(Driver(folder))
    driver = Driver(folder)
    forward, failures = driver.runner.model.forward, [1, 4]  # the prompt's step, and a decode

    def failing(batch: Any) -> torch.Tensor:
        failing.calls += 1
        if failing.calls in failures:
            raise torch.OutOfMemoryError("tried to allocate 2.00 MiB")
        return forward(batch)

    failing.calls = 0
    driver.runner.programs = driver.runner.decodes = None
    monkeypatch.setattr(driver.runner.model, "forward", failing)
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(failing.calls))
    assert answer(driver) == expected
    assert emptied == failures


def answer(driver: Driver) -> list[int]:
    request = driver.submit([5, 6, 7], max_tokens=4)
    driver.run()
    return driver.tokens(request)
