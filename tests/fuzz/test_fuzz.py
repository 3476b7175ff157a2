"""Some seconds of `make fuzz`, and the inputs that failed once."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.fuzz import run
from tests.fuzz.mutate import has_more_values, mutate_bytes, mutate_json_bytes
from tests.fuzz.run import fuzz
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

SECONDS = 0.5
THOROUGH_S = 20.0


@pytest.mark.parametrize(
    "seconds", [SECONDS, pytest.param(THOROUGH_S, marks=pytest.mark.slow)], ids=["short", "long"]
)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.variants(6)
async def test_inputs_of_target_are_handled(target: Target, seconds: float) -> None:
    await fuzz(target, seconds, seed=1, store=False, least=target.least)


def test_mutations_depend_on_the_seed_only() -> None:
    for mutate in (mutate_bytes, mutate_json_bytes):
        made = [[mutate(Random(n), b'{"a": [1, "b"]}') for n in range(99)] for _ in range(2)]
        assert made[0] == made[1]
        assert len(set(made[0])) > 50


def test_input_that_a_process_died_of_becomes_a_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has the input that is being checked, also after a crash of the interpreter."""
    monkeypatch.setattr(run, "CASES", tmp_path / "cases")
    monkeypatch.setattr(run, "JOURNALS", tmp_path / "journals")
    target = TARGETS[0]
    with run.journal(target, store=True) as pages:
        pages[:12] = (4).to_bytes(8, "little") + b"dead"
    with run.journal(target, store=True) as pages:
        pages[:8] = bytes(8)
    assert run.kept_cases(target) == [b"dead"]
    with run.journal(target, store=True):
        pass
    assert run.kept_cases(target) == [b"dead"]


def test_document_of_shared_lists_is_measured_without_writing_it_out() -> None:
    document: list[object] = [1]
    for _ in range(9):
        document = [document] * 50
    assert has_more_values(document, 1000)
    assert not has_more_values([[1, 2], {"a": 3}], 6)
