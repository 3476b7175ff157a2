"""Record the ids that llama.cpp gives to texts.json: `python -m tests.data.vectors`.

Needs PyPI's xllamacpp 2026.10.11549, which has llama.cpp's server. It is not part of any extra.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import httpx2
import numpy as np

from tests.data.make import FOLDER, write
from tests.engine.checkpoint.gguf.test_tokenizer import settings_of

# Folder -> tokenizer.ggml.model, tokenizer.ggml.pre
KINDS = {
    "tokenizers/byte-level": ("gpt2", "gpt-2"),
    "checkpoints/tales-llama": ("llama", "default"),
}
WIDTH = 32


def write_model(path: Path, settings: dict[str, Any]) -> None:
    """Write a Llama of one layer with this tokenizer; its weights do not matter."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(settings["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(settings["tokenizer.ggml.pre"])
    tokens = settings["tokenizer.ggml.tokens"]
    writer.add_token_list(tokens)
    writer.add_token_types(settings["tokenizer.ggml.token_type"])
    if "tokenizer.ggml.merges" in settings:
        writer.add_token_merges(settings["tokenizer.ggml.merges"])
    else:
        writer.add_token_scores(settings["tokenizer.ggml.scores"])
        writer.add_unk_token_id(0)
    square = np.ones((WIDTH, WIDTH), np.float32)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", square[0])
    writer.add_tensor("token_embd.weight", np.ones((len(tokens), WIDTH), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ids_of(model: Path, texts: list[str]) -> list[list[int]]:
    """The ids of each text without the tokens that begin or end a prompt."""
    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path = str(model)
    params.n_ctx = 256
    params.port = 0
    server = Server(params)
    found = []
    for text in texts:
        body = {"content": text, "add_special": False, "parse_special": True}
        answer = httpx2.post(f"{server.listening_address}/tokenize", json=body)
        found.append(answer.json()["tokens"])
    return found


def main() -> None:
    texts = json.loads((FOLDER / "texts.json").read_text())
    for name, kind in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, "a.gguf")
            write_model(model, settings_of(FOLDER / name / "tokenizer.json", *kind))
            write(FOLDER / name / "ids.json", ids_of(model, texts))


if __name__ == "__main__":
    main()
