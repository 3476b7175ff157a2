#!/usr/bin/env bash
# llama.cpp ends an answer at tokens with certain texts, even if the GGUF file says that they are
# ordinary tokens, and at token 11 if a GPT-2 tokenizer names no end.
#
# Surprising: (1) the type of a token does not matter: a normal token "</s>", as in Qwen's vocabulary,
# ends an answer and becomes a control token; (2) an end that the file names as its EOS stops being one
# if other tokens are in the vocabulary; (3) without tokenizer.ggml.eos_token_id, the EOS of a "gpt2"
# tokenizer is id 11, any token; (4) an array eos_token_ids is not read.
# Versions: xllamacpp 2026.10.11549 (llama.cpp of October 2026), gguf 0.19.0.
# Why it matters: a server that trusts the ids and types of the file runs on past the end of a turn.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0

cat >"$folder/ends.py" <<'PYTHON'
import importlib.metadata
import os
import re
import sys

import numpy as np
from gguf import GGUFWriter
from xllamacpp import CommonParams, Server

NORMAL, CONTROL = 1, 3
BASE = ["<unk>", "<s>", "<e>", *"abcdefgh,jkl"]


def write(path, kind, more, **ids):
    names = BASE + list(more)
    kinds = [2, CONTROL, CONTROL] + [NORMAL] * (len(BASE) - 3) + list(more.values())
    writer = GGUFWriter(path, "llama")
    for key, value in dict(block_count=1, context_length=64, embedding_length=8,
                           feed_forward_length=8).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_scores([0.0] * len(names))
    writer.add_token_merges(["a b"])
    for key, value in ids.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    shapes = {"token_embd": (len(names), 8)}
    names_of_block = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (8, 8) for name in names_of_block}
    shapes |= {"output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return names


def stops(path, token):
    """Whether an answer stops at its first token if that is forced to be `token`."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        params = CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = path, 64, 1
        params.warmup, params.n_gpu_layers = False, 0
        answer = Server(params).handle_completions(
            {"prompt": [1, 3], "n_predict": 3, "temperature": 0, "logit_bias": [[token, 100]]}
        )
        reason = answer["choices"][0]["finish_reason"]
        os.write(writer, f"{reason} {answer['usage']['completion_tokens']}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        found = stream.read()
    os.wait()
    return found == "stop 1"


def case(what, due, kind, more, token, **ids):
    path = os.path.join(sys.argv[1], "tiny.gguf")
    names = write(path, kind, more, **ids)
    found = stops(path, names.index(token))
    print(f"{what}: {'ends' if found else 'runs on'}")
    assert found == due, what


print("xllamacpp", importlib.metadata.version("xllamacpp"))
both = {"bos_token_id": 1, "eos_token_id": 2}
case("the file's EOS", True, "llama", {}, "<e>", **both)
case("a normal token x", False, "llama", {"x": NORMAL}, "x", **both)
case("a normal token </s>", True, "llama", {"</s>": NORMAL}, "</s>", **both)
case("a normal token <end_of_turn>", True, "llama", {"<end_of_turn>": NORMAL}, "<end_of_turn>", **both)
case("a control token <|eot|>", False, "llama", {"<|eot|>": CONTROL}, "<|eot|>", **both)
calls = {"<|return|>": CONTROL, "<|call|>": CONTROL, "<|end|>": CONTROL}
case("<|end|> as EOS, with calls", False, "llama", calls, "<|end|>", bos_token_id=1,
     eos_token_id=len(BASE) + 2)
case("<|end|> as EOS, alone", True, "llama", {"<|end|>": CONTROL}, "<|end|>", bos_token_id=1,
     eos_token_id=len(BASE))
case("eos_token_ids [3]", False, "llama", {}, "a", **both, eos_token_ids=[3])
case("gpt2 without an EOS: token 11, ','", True, "gpt2", {}, ",")
PYTHON
"$folder/venv/bin/python" "$folder/ends.py" "$folder" 2>/dev/null
# Output:
#   xllamacpp 2026.10.11549
#   the file's EOS: ends
#   a normal token x: runs on
#   a normal token </s>: ends
#   a normal token <end_of_turn>: ends
#   a control token <|eot|>: runs on
#   <|end|> as EOS, with calls: runs on
#   <|end|> as EOS, alone: ends
#   eos_token_ids [3]: runs on
#   gpt2 without an EOS: token 11, ',': ends
