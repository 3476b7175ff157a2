"""`penstock merge --method lora`: the folded model is the formula, and answers as its adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ConfigError
from engine.offline.merge.merge import merge
from engine.offline.merge.recipe import parse
from server.cli.merge import recipe_of
from tests.engine.offline.merge.merging import FILE, Make, run
from tests.support.adapters import PREFIX, folded, random_adapter, write_adapter
from tests.support.driver import Driver, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")


def recipe(*models: object, **flags: Any) -> dict[str, Any]:
    return recipe_of(None, list(map(str, models)), "lora", None, [], None, **flags)


def test_folded_model_is_the_formula_and_answers_as_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("engine.checkpoint.stored", "engine.offline.merge.fold"):
        monkeypatch.setattr(f"{module}.CHUNK", 100)  # pieces end within rows
    base = tiny_llama(tmp_path / "base")
    adapter = random_adapter(tmp_path / "adapter", base, rank=4)
    found = run(tmp_path / "out", **recipe(base, adapter))
    due = load_file(folded(base, adapter, tmp_path / "due") / FILE)
    assert found.keys() == due.keys()
    for name, tensor in due.items():
        torch.testing.assert_close(found[name], tensor)
    served = Driver(base, lora_modules=(f"a={adapter}",)), Driver(tmp_path / "out")
    answers = []
    for number, driver in zip((1, 0), served, strict=True):
        request_id = driver.submit([5, 9, 77, 30], 12, adapter=number)
        driver.run()
        answers.append(driver.tokens(request_id))
    assert answers[0] == answers[1]


def test_fold_into_conv1d_turns_the_change_and_finds_a_shorter_name(
    tmp_path: Path, make: Make
) -> None:
    base = make("base", {"h.0.attn.c_attn.weight": torch.zeros(3, 6)})
    a, b = torch.randn(2, 3), torch.randn(6, 2)
    module = f"{PREFIX}transformer.h.0.attn.c_attn"
    tensors = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    adapter = write_adapter(tmp_path / "adapter", tensors, lora_alpha=6, fan_in_fan_out=True)
    found = run(tmp_path / "out", **recipe(base, adapter))
    torch.testing.assert_close(found["h.0.attn.c_attn.weight"], 3 * (b @ a).t())


def test_fold_of_an_adapter_that_does_not_fit_is_refused(tmp_path: Path, make: Make) -> None:
    base = make("base", {"a.weight": torch.zeros(4, 3)})
    for name, width, message in (("b", 3, "is for b, which"), ("a", 2, "has [4, 3]")):
        module = f"{PREFIX}{name}"
        halves = {"A": torch.ones(1, width), "B": torch.ones(4, 1)}
        tensors = {f"{module}.lora_{half}.weight": value for half, value in halves.items()}
        adapter = write_adapter(tmp_path / name, tensors)
        document = parse(recipe(base, adapter))
        with pytest.raises(ConfigError) as refused:
            merge(document, tmp_path / "out", lambda share: None)
        assert message in str(refused.value)
        assert not (tmp_path / "out").exists()


def test_lora_recipe_needs_a_base_model_and_one_adapter() -> None:
    with pytest.raises(ConfigError, match="give the base model, then the adapter's folder"):
        recipe("a")
    with pytest.raises(ConfigError, match="--t cannot be used with --method lora"):
        recipe("a", "b", t=0.5)
