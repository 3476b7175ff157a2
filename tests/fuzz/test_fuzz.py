"""A minute of `make fuzz`, and the inputs that failed once."""

from __future__ import annotations

from random import Random

import pytest

from tests.fuzz.mutate import mutate_bytes, mutate_json_bytes
from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS, Target

SECONDS = 7.0


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.usefixtures("assets")
async def test_inputs_of_target_are_handled(target: Target) -> None:
    tally = await fuzz(target, SECONDS, seed=1, store=False)
    assert tally.inputs > 20


def test_mutations_depend_on_the_seed_only() -> None:
    for mutate in (mutate_bytes, mutate_json_bytes):
        made = [[mutate(Random(n), b'{"a": [1, "b"]}') for n in range(99)] for _ in range(2)]
        assert made[0] == made[1]
        assert len(set(made[0])) > 50
