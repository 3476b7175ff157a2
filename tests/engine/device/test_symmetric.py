"""Ranks find each other for shared memory by torch's functions, with a stand-in for CUDA's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

from engine.device.symmetric import symmetric_buffer

NAME = "penstock-test"


class Symmetric:
    """Memory of this process. It asks for the group as both older and newer versions do."""

    groups: dict[str, tuple[int, int, Any]]
    found: list[tuple[int, int]]

    @classmethod
    def set_group_info(cls, name: str, rank: int, size: int, store: Any) -> None:
        cls.groups[name] = rank, size, store

    @staticmethod
    def empty_strided_p2p(
        size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(7)

    @classmethod
    def rendezvous(cls, memory: torch.Tensor, name: str) -> Symmetric:
        group = c10d._resolve_process_group(name)
        cls.found.append((group.rank(), group.size()))
        cls.found.append(cls.groups[name][:2])
        assert not memory.any(), "others may write already"
        cls.groups[name][2].set("key", "value")
        return cls()

    @property
    def buffer_ptrs(self) -> list[int]:
        return [16, 32]


def test_ranks_find_each_other_in_older_and_newer_versions_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Symmetric.groups, Symmetric.found = {}, []
    monkeypatch.setattr(c10d, "_SymmetricMemory", Symmetric)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    store = distributed.FileStore(str(tmp_path / "place"), 2)
    cpu = torch.device("cpu")
    try:
        buffer = symmetric_buffer(NAME, store, 1, 2, 48, cpu)
    finally:
        c10d._unregister_process_group(NAME)
    assert buffer.memory.shape == (48,)
    assert buffer.addresses == [16, 32]
    assert Symmetric.found == [(1, 2), (1, 2)]
    assert store.get(f"{NAME}/key") == b"value"


def test_torch_has_the_functions_that_are_called() -> None:
    """Without CUDA they refuse the device, and no other argument."""
    with pytest.raises(RuntimeError, match="does not support device type cuda"):
        c10d._SymmetricMemory.empty_strided_p2p((1,), (1,), torch.uint8, torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="does not support device type cpu"):
        c10d._SymmetricMemory.rendezvous(torch.zeros(1), NAME)
    assert callable(c10d._SymmetricMemory.set_group_info)
