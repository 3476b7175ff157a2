"""Copies of the beginnings of blocks, when groups of layers share the blocks of one pool."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.scheduling.step import BlockCopy
from tests.support.driver import Driver
from tests.support.tiny_windows import windowed_qwen2

SIZE = 16


def test_all_sources_are_read_before_a_block_of_any_group_is_written(tmp_path: Path) -> None:
    """A source may be evicted behind its match, and be the target of another group's copy."""
    driver = Driver(windowed_qwen2(tmp_path), block_size=SIZE)
    assert len(driver.core.facts.kv_groups) > 1
    kv = driver.runner.kv
    for number, tensor in enumerate(kv._tensors):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))
    first, second = ([part.clone() for part in kv.of_block(group, 5 + group)] for group in (0, 1))
    driver.runner._copy_blocks([BlockCopy(5, 6, SIZE, 0), BlockCopy(6, 5, SIZE, 1)])
    for group, block, expected in ((0, 6, first), (1, 5, second)):
        for part, source in zip(kv.of_block(group, block), expected, strict=True):
            assert torch.equal(part, source)
