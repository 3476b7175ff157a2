"""Each later stage of the training continues from the files of the one before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint.bounded_json import read_json
from engine.offline.demo_training.chat import FOLDER
from engine.offline.demo_training.files import TOKENIZER, WEIGHTS, copy_settings
from engine.offline.demo_training.train import (
    STAGES,
    Agent,
    Chat,
    Practice,
    Review,
    main,
)


@pytest.mark.variants(1)
@pytest.mark.parametrize("stage", [2, 3, 4])
def test_later_stage_keeps_the_tokenizer_and_changes_weights(tmp_path: Path, stage: int) -> None:
    copy_settings(FOLDER, tmp_path)
    for name in (WEIGHTS, TOKENIZER):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    threads = torch.get_num_threads()
    try:
        main(steps=1, out=tmp_path, stage=stage)
    finally:
        torch.set_num_threads(threads)
    before = load_file(FOLDER / WEIGHTS)
    after = load_file(tmp_path / WEIGHTS)
    assert before.keys() == after.keys()
    assert (tmp_path / TOKENIZER).read_bytes() == (FOLDER / TOKENIZER).read_bytes()
    changes = []
    for name, weight in before.items():
        assert after[name].dtype == weight.dtype == torch.bfloat16
        changes.append((after[name].float() - weight.float()).norm() / weight.float().norm())
    assert 0 < max(changes) < 0.02


def test_stages_of_a_model_have_one_folder() -> None:
    for stages in STAGES.values():
        assert len({stage.folder for stage in stages}) == 1


def test_stages_after_the_second_have_the_whole_context() -> None:
    config = read_json(FOLDER / "config.json")
    early = [Chat(config).config, Practice(config).config]
    assert [(c.max_positions, c.rope_scaling.kind) for c in early] == 2 * [(1024, "default")]
    late = [Agent(config).config, Review(config).config]
    assert [(c.max_positions, c.rope_scaling.kind) for c in late] == 2 * [(16384, "llama3")]
