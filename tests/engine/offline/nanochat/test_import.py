"""`penstock import nanochat` converts upstream's files to a folder that can be served."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.offline.nanochat.checkpoint import ModelConfig
from engine.offline.nanochat.generation import GENERATIONS, layer_windows
from server.text.load_template import load_template
from server.text.load_tokenizer import load_tokenizer
from tests.support.driver import Driver
from tests.support.naive_nanochat import Naive
from tests.support.nanochat_files import (
    SIZES,
    TINY,
    encoding_state,
    imported,
    penstock,
    save_checkpoint,
    save_tokenizer,
)

pytestmark = pytest.mark.usefixtures("one_thread")
FIRST = Naive(
    replace(SIZES, n_layer=3, window_pattern=None),
    windows=(1000,) * 3,
    rope_base=10_000.0,
    qk_factor=1.0,
    lambdas=False,
    gate=None,
    smear=False,
    rows=300,
)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_import_command_makes_a_folder_that_answers_like_the_checkpoint(base: Path) -> None:
    out = base.parent / "served"
    answer = penstock(base, "--out", out)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "nanochat from 2026-03-14 or later" in answer.stdout
    assert "qk_scale = 1.2" in answer.stdout
    assert {file.name for file in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1

    tokenizer = load_tokenizer(out)
    template = load_template(out, None)
    assert template is not None
    text = template.render([{"role": "user", "content": "Which of the two is it?"}])
    prompt = tokenizer.encode(text, add_special_tokens=False)
    driver = Driver(out, block_size=16)
    request = driver.submit(prompt, max_tokens=40)
    driver.run()
    expected = TINY.generate(torch.tensor([prompt]), max_new_tokens=40)[0, len(prompt) :]
    assert driver.tokens(request) == expected.tolist()


def test_import_first_generation_loads_in_transformers(tmp_path: Path) -> None:
    """transformers also confirms the naive reference with an independent implementation."""
    transformers = pytest.importorskip("transformers")
    source = save_checkpoint(tmp_path / "d3", FIRST)
    save_tokenizer(source, encoding_state(300))
    out, lines = imported(source, tmp_path / "served")
    assert "nanochat from 2025" in lines[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = torch.randint(300, (1, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, FIRST(ids).logits, rtol=1e-4, atol=2e-4)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "the two"}]
    assert theirs.apply_chat_template(messages, tokenize=False).startswith("<|bos|><|user_start|>")


@pytest.mark.parametrize(
    ("naive", "facts"),
    [
        (
            TINY,
            {"rope_theta": 100_000.0, "qk_scale": 1.2, "smear_channels": 24, "backout_layer": 2},
        ),
        (
            replace(TINY, smear=False),
            {
                "rope_theta": 100_000.0,
                "qk_scale": 1.15,
                "smear_channels": None,
                "backout_layer": None,
            },
        ),
        (
            replace(TINY, smear=False, gate=(32, 2.0)),
            {
                "rope_theta": 10_000.0,
                "qk_scale": 1.0,
                "layer_windows": [65, 65, 65, 129, 129],
                "value_layers": [0, 2, 4],
                "value_gate_channels": 32,
                "value_gate_range": 2.0,
            },
        ),
        (
            replace(TINY, smear=False, gate=None),
            {"qk_scale": 1.0, "value_layers": [], "residual_lambdas": True},
        ),
        (FIRST, {"residual_lambdas": False, "layer_windows": [None] * 3, "rope_theta": 10_000.0}),
    ],
    ids=["smear", "gates-of-12", "gates-of-32", "lambdas", "first"],
)
def test_import_inferred_settings_are_written_and_printed(
    naive: Naive, facts: dict[str, Any], tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "d5", encoding_state(300))
    out, lines = imported(save_checkpoint(tmp_path / "d5", naive), tmp_path / "served")
    config = config_of(out)
    assert {key: config[key] for key in facts} == facts
    assert config["final_logit_softcapping"] == 15.0
    for key in facts:
        assert f"  {key} = {config[key]}" in lines
    assert any(line.startswith("In doubt") for line in lines) == (naive.gate == (32, 2.0))


@pytest.mark.parametrize(
    ("dates", "short"),
    [("2026-03-14", 513), ("2026-03-09", 769), ("2026-01-16", 1025), ("2026-01-11", 1025)],
)
def test_layer_windows_at_2048_tokens_match_upstream(dates: str, short: int) -> None:
    (generation,) = (g for g in GENERATIONS if g.dates.startswith(dates))
    sizes = ModelConfig(2048, 32768, 6, 6, 6, 768, "SSSL")
    assert layer_windows(sizes, generation) == [short, short, short, 2049, short, 2049]
    alone = ModelConfig(2048, 32768, 2, 6, 6, 768)  # an old meta file without a pattern
    assert layer_windows(alone, generation) == [2049, 2049]


def test_import_prefers_tuned_deepest_and_latest_checkpoint(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fine-tuned model is preferred to the base model, then the deepest, then the last step."""
    tuned = base / "chatsft_checkpoints"
    deeper = replace(TINY, sizes=replace(SIZES, n_layer=6), windows=(128,) * 6)
    shutil.copytree(tuned / "d5", base / "base_checkpoints" / "d20")
    for step in (90, 1000):
        save_checkpoint(tuned / "d12", deeper, step, prefix="_orig_mod.")
    (tuned / "d12" / "model_002000_backup.pt").touch()
    (tuned / "notes").mkdir()
    monkeypatch.chdir(base)
    out, lines = imported(base, None)
    assert out == Path("nanochat-d12")
    assert lines[0].startswith(str(tuned / "d12" / "model_001000.pt"))
    assert config_of(out)["num_hidden_layers"] == 6
    _, lines = imported(base, base / "older", step=90)
    assert "model_000090.pt" in lines[0]
    _, lines = imported(base / "base_checkpoints", base / "other", tokenizer=base / "tokenizer")
    assert "d20/model_000007.pt" in lines[0]


def test_import_bfloat16_embeddings_set_epsilon_and_keep_dtype(base: Path) -> None:
    file = base / "chatsft_checkpoints" / "d5" / "model_000007.pt"
    state = {n: t.bfloat16() if "wte" in n else t for n, t in TINY.tensors.items()}
    torch.save(state, file)
    out, _ = imported(base, base / "served")
    assert config_of(out)["rms_norm_eps"] == 0.0078125
    tensors = load_file(out / "model.safetensors")
    wte = tensors["model.embed_tokens.weight"]
    assert torch.equal(wte, state["transformer.wte.weight"][:300])
    assert wte.dtype == torch.bfloat16
    assert tensors["lm_head.weight"].dtype == torch.float32


def test_import_tensors_that_share_memory_or_have_gaps_are_copied(base: Path) -> None:
    """safetensors refuses to write such tensors; torch.save keeps how they are stored."""
    file = base / "chatsft_checkpoints" / "d5" / "model_000007.pt"
    state = dict(TINY.tensors)
    first, second = [n for n in state if n.endswith("c_fc.weight")][:2]
    state[second] = state[first]
    turned = next(n for n in state if n.endswith("c_proj.weight") and "mlp" in n)
    state[turned] = state[turned].T.contiguous().T
    constant = next(n for n in state if n.endswith("c_q.weight"))
    state[constant] = torch.full((1,), 0.5).expand(state[constant].shape)
    torch.save(state, file)
    out, _ = imported(base, base / "served")
    tensors = list(load_file(out / "model.safetensors").values())
    for name in (first, turned, constant):
        assert any(torch.equal(t, state[name]) for t in tensors if t.shape == state[name].shape)
