#!/usr/bin/env bash
# llama.cpp does not read the yarn keys that its own converter writes for Llama models, and it
# scales positions by a factor without a type.
#
# Surprising: (1) rope.scaling.yarn_beta_fast, yarn_beta_slow, yarn_attn_factor and yarn_ext_factor,
# which the converter takes from config.json, change no bit of the answer;
# (2) rope.scaling.factor without rope.scaling.type is linear scaling, not none;
# (3) rope.scaling.attn_factor applies without any scaling; (4) attention.scale and logit_scale, known
# keys of other architectures, are dropped without a word.
# Versions: xllamacpp 2026.10.11549 (llama.cpp of October 2026), gguf 0.19.0.
# Why it matters: an importer that computes what the keys say has other numbers than llama.cpp.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0

cat >"$folder/keys.py" <<'PYTHON'
import importlib.metadata
import json
import os
import sys

import numpy as np
from gguf import GGUFWriter
from xllamacpp import CommonParams, Server

TOKENS = ["<unk>", "<s>", "</s>", *(a + b for a in "abcdefgh" for b in "abcdefgh")]
SCALE = "rope.scaling."


def write(path, architecture, settings):
    draw, count = np.random.RandomState(0), len(TOKENS)
    writer = GGUFWriter(path, architecture)
    sizes = dict(block_count=1, context_length=256, embedding_length=32, feed_forward_length=32)
    for key, value in (sizes | {"attention.head_count": 2}).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in settings.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](f"{architecture}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3, 3] + [1] * (count - 3))
    writer.add_token_scores([0.0] * count)
    shapes = {"token_embd": (count, 32), "output": (count, 32)}
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (32, 32) for name in parts}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape).astype(np.float32) * 0.3)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def next_tokens(architecture, settings):
    """The five most probable tokens and their logarithms."""
    path = os.path.join(sys.argv[1], "tiny.gguf")
    write(path, architecture, settings)
    reader, writer = os.pipe()
    if os.fork() == 0:
        params = CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = path, 256, 1
        params.warmup, params.n_gpu_layers, params.cpuparams.n_threads = False, 0, 1
        request = {"prompt": [1, *range(5, 60)], "n_predict": 1, "temperature": 0, "n_probs": 5}
        found = Server(params).handle_completions(request | {"ignore_eos": True})
        [token] = found["choices"][0]["logprobs"]["content"]
        pairs = [[entry["id"], entry["logprob"]] for entry in token["top_logprobs"]]
        os.write(writer, json.dumps(pairs).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        found = json.loads(stream.read())
    os.wait()
    return found


YARN = {f"{SCALE}type": "yarn", f"{SCALE}factor": 4.0, f"{SCALE}original_context_length": 64}
WRITTEN = {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "yarn_attn_factor": 2.0,
           "yarn_ext_factor": 0.5}
print("xllamacpp", importlib.metadata.version("xllamacpp"))
name = "llama"
plain, yarn = next_tokens(name, {}), next_tokens(name, YARN)
for key, value in WRITTEN.items():
    same = next_tokens(name, YARN | {SCALE + key: value}) == yarn
    print(f"yarn with {key} {value}: {'the same' if same else 'other numbers'}")
    assert same
linear = next_tokens(name, {f"{SCALE}type": "linear", f"{SCALE}factor": 4.0})
same = next_tokens(name, {f"{SCALE}factor": 4.0}) == linear != plain
print(f"a factor without a type: {'as linear' if same else 'not as linear'}")
assert same
same = next_tokens(name, {f"{SCALE}attn_factor": 0.5}) == plain
print(f"attn_factor 0.5 alone: {'the same' if same else 'other numbers'}")
assert not same
for key in ("attention.scale", "logit_scale"):
    same = next_tokens(name, {key: 0.5}) == plain
    print(f"{key} 0.5: {'the same' if same else 'other numbers'}")
    assert same
PYTHON
"$folder/venv/bin/python" "$folder/keys.py" "$folder" 2>/dev/null
# Output:
#   xllamacpp 2026.10.11549
#   yarn with yarn_beta_fast 16.0: the same
#   yarn with yarn_beta_slow 2.0: the same
#   yarn with yarn_attn_factor 2.0: the same
#   yarn with yarn_ext_factor 0.5: the same
#   a factor without a type: as linear
#   attn_factor 0.5 alone: other numbers
#   attention.scale 0.5: the same
#   logit_scale 0.5: the same
