"""Quantised checkpoints whose codes are kept: the numbers, the memory, and what users see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.numba.codes import CodesLinear, has_instructions
from engine.layers.linear import Linear
from tests.support.driver import Driver
from tests.support.forward import forward, whole
from tests.support.gguf_files import write_gguf
from tests.support.golden import of_transformers
from tests.support.quantized_files import FORMATS, write_quantized
from tests.support.ranks import ranked

pytestmark = [
    pytest.mark.usefixtures("one_thread", "own_cache"),
    pytest.mark.skipif(
        not has_instructions(), reason="this CPU does not multiply 8-bit numbers (AVX512_VNNI)"
    ),
]
PROMPT = torch.randint(288, (60,), generator=torch.Generator().manual_seed(1)).tolist()
BF16: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "auto"}
KEPT = [name for name, form in FORMATS.items() if form.keeps_codes]
# One Linear holds q, k and v: of Q4_0, Q8_0 and Q5_1 they have three forms.
MIXED = {"attn_k": "Q8_0", "attn_v": "Q5_1", "ffn_down": "Q4_1"}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "own head"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama") / "checkpoint"
    sizes = {"vocab_size": 288, "hidden_size": 64, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    of_transformers(
        LlamaConfig(**sizes, **heads, num_hidden_layers=2, tie_word_embeddings=request.param),
        folder,
    )
    return folder


def logits(driver: Driver) -> torch.Tensor:
    return forward(driver.runner, [PROMPT], whole([PROMPT]))[0]


def check(model: Path, kind: str) -> None:
    """Kept codes give about the logits of plain weights, in fewer bytes.

    Their kernel also rounds inputs to 8 bits, which is more than bf16 does in a model this narrow.
    """
    kept, plain = Driver(model, **BF16), Driver(model, quantization="none", **BF16)
    exact = logits(Driver(model, dtype="float32"))
    assert kept.loaded.facts.quantization == kind
    assert plain.loaded.facts.quantization is None
    linears = [m for m in kept.runner.model.modules() if isinstance(m, Linear)]
    assert all(isinstance(linear.tensors.packed, CodesLinear) for linear in linears)
    errors = [(logits(driver) - exact).norm() / exact.norm() for driver in (kept, plain)]
    assert errors[0] < 3 * errors[1] < 0.12
    ids = torch.arange(288)
    rows = [driver.runner.model.embed(ids) for driver in (kept, plain)]
    assert torch.equal(*rows), "the codes of a tied head change the inputs"
    assert kept.loaded.facts.weight_bytes < plain.loaded.facts.weight_bytes
    for entry in kept.loaded.facts.memory:
        assert entry.measured in (None, entry.planned), entry.name


@pytest.mark.variants(5)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_codes_of_gguf_are_kept(kind: str, source: Path, tmp_path: Path) -> None:
    check(write_gguf(tmp_path / "model.gguf", source, "llama", kind), kind)


def test_codes_of_several_kinds_share_a_layer(source: Path, tmp_path: Path) -> None:
    check(write_gguf(tmp_path / "model.gguf", source, "llama", "Q4_0", others=MIXED), "Q4_0")


@pytest.mark.variants(8)
@pytest.mark.parametrize("source", [False], indirect=True, ids=["own head"])
@pytest.mark.parametrize("name", KEPT)
def test_codes_of_checkpoints_are_kept(name: str, source: Path, tmp_path: Path) -> None:
    write_quantized(source, tmp_path / "model", FORMATS[name])
    check(tmp_path / "model", FORMATS[name].settings["quant_method"])


def test_codes_of_fused_layers_are_kept(tmp_path: Path) -> None:
    """Their rows are q, k and v of one head after another."""
    from transformers import GPTNeoXConfig

    sizes = {"vocab_size": 288, "hidden_size": 64, "intermediate_size": 96}
    config = GPTNeoXConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    of_transformers(config, tmp_path / "source")
    write_quantized(tmp_path / "source", tmp_path / "model", FORMATS["gptq 4"])
    check(tmp_path / "model", "gptq")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_codes_are_shared_by_ranks(tied: bool, tmp_path: Path) -> None:
    """Each rank keeps whole groups of its inputs. In the last layer, kinds are mixed."""
    from transformers import LlamaConfig

    sizes = {"vocab_size": 289, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=2, tie_word_embeddings=tied)
    of_transformers(config, tmp_path / "source")
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "source", "llama", "Q4_0", others=MIXED)
    alone = prompt_logprobs(Driver(file, **BF16))
    with ranked(file, tmp_path / "place", **BF16) as driver:
        facts = driver.loaded.facts
        assert facts.quantization == "Q4_0"
        assert prompt_logprobs(driver) == pytest.approx(alone, abs=0.5)
        for entry in (*facts.memory, *facts.other_ranks[0]):
            assert entry.measured in (None, entry.planned), entry.name


def prompt_logprobs(driver: Driver) -> list[float]:
    request_id = driver.submit(PROMPT, 1, prompt_logprobs=0)
    driver.run()
    return [entry.logprob for entry in driver.outputs[request_id][0].prompt_logprobs]


def test_plain_layers_stay_plain(source: Path, tmp_path: Path) -> None:
    """One part without codes makes the whole layer plain."""
    file = write_gguf(
        tmp_path / "model.gguf", source, "llama", "Q8_0", others={"attn_v": "F16", "token": "F32"}
    )
    driver = Driver(file, **BF16)
    blocks = driver.runner.model.blocks
    assert not isinstance(blocks[0].attention.qkv.tensors.packed, CodesLinear)
    assert isinstance(blocks[0].mlp.down.tensors.packed, CodesLinear)
    for entry in driver.loaded.facts.memory:
        assert entry.measured in (None, entry.planned), entry.name


def test_another_form_is_a_choice(source: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", source, "llama", "Q8_0")
    driver = Driver(file, quantization="int4", **BF16)
    assert driver.loaded.facts.quantization == "int4"
