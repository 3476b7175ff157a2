"""`penstock run-batch`: the flags that it refuses."""

from __future__ import annotations

from tests.support.command_line import penstock


def test_command_with_a_foreign_flag_exits_with_2() -> None:
    answer = penstock("run-batch", "demo", "-c", "4096", "--tp", "2")
    assert answer.returncode == 2
    assert "Penstock's is --max-model-len." in answer.stderr
    assert "Penstock's is --tensor-parallel-size." in answer.stderr
