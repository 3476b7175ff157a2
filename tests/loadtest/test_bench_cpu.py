"""`make bench`: its GGUF file has the weights of the checkpoint, and its table is complete."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from loadtest.bench_cpu import print_table
from loadtest.gguf_model import FILE_TYPES, HEAD_OF, write_gguf
from loadtest.random_model import LLAMA_125M, write_random_model

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a matrix after it was stored as `kind`; vectors are stored as they are."""
    if weight.ndim < 2:
        return weight.float()
    number = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(weight.float().numpy(), number)
    return torch.from_numpy(gguf.quants.dequantize(stored, number))


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_write_gguf_file_has_every_weight(tmp_path: Path, kind: str) -> None:
    write_random_model(tmp_path, LLAMA_125M | SMALL | HEADS)
    write_gguf(tmp_path, tmp_path / "model.gguf", kind)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {}
    for tensor in reader.tensors:
        numbers = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        found[tensor.name] = numbers.reshape(tensor.shape[::-1].tolist())
    given = {
        name: rounded(weight, HEAD_OF.get(kind, kind) if "embed" in name else kind)
        for name, weight in load_file(tmp_path / "model.safetensors").items()
    }
    assert len(found) == len(given) == 2 + 9 * 2
    assert torch.equal(found["token_embd.weight"], given["model.embed_tokens.weight"])
    assert torch.equal(found["blk.1.ffn_down.weight"], given["model.layers.1.mlp.down_proj.weight"])
    for name, theirs, heads in (("q", "attn_q", 4), ("k", "attn_k", 2)):
        ours = given[f"model.layers.1.self_attn.{name}_proj.weight"]
        # Llama rotates dimension i of a head with i + 8; llama.cpp rotates 2 i with 2 i + 1.
        for head in range(heads):
            rows = found[f"blk.1.{theirs}.weight"][head * 16 : (head + 1) * 16]
            assert torch.equal(rows[0::2], ours[head * 16 : head * 16 + 8])
            assert torch.equal(rows[1::2], ours[head * 16 + 8 : head * 16 + 16])
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 300
    assert tokens[1] == "<s>"


def test_print_table_has_a_column_for_each_contender(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        {
            "machine": [{"gflops": 1000.0, "gbytes": 25.0, "weight_gbytes": 20.0}],
            "load": {"prompt": 128, "new": 64},
            "dtype": "bfloat16",
            "rows": {
                "8": {
                    "penstock": [(200, 30.0), (240, 20.0), (220, 25.0)],
                    "transformers": [(100, 50.0)] * 3,
                    "torch": [(110, 45.0)] * 3,
                }
            },
        }
    )
    head, rule, row, *_ = capsys.readouterr().out.strip().splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[1:6] == ["8", "220 · 25.0 ms", "110 · 45.0 ms", "100 · 50.0 ms", "2.2 · 1.1"]
