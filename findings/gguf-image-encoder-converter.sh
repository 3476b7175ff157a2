#!/usr/bin/env bash
# llama.cpp's converter cannot read the tower of a Gemma 3 that transformers saves, and gives Qwen3-VL's
# tower the epsilon of the language model.
#
# Surprising: (1) Gemma 3's tower is converted under the names of the published files only
# (vision_tower.vision_model.*): a checkpoint that transformers 5.24 has saved (vision_tower.*) ends
# with "Can not map tensor". (2) The norms of Qwen3-VL's tower have a fixed epsilon of 1e-6 in
# transformers; the converter writes rms_norm_eps of text_config for them.
# Versions: the converter in llama-cpp-python 0.3.36 (llama.cpp commit 0c1e57098), transformers 5.24.0.
# Why it matters: a fine-tuned Gemma 3 has to be renamed before it is converted, and the epsilon in an
# image encoder's file is not always the one of the model that it was made from.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformers==5.24.0 numpy==2.4.6
"$folder/venv/bin/pip" download -q --no-deps --no-binary=:all: --dest="$folder" llama-cpp-python==0.3.36
tar -xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder"

cat >"$folder/convert.py" <<'PYTHON'
import json
import pathlib
import subprocess
import sys

import transformers

folder = pathlib.Path(sys.argv[1])
source = folder / "llama_cpp_python-0.3.36/vendor/llama.cpp"
sys.path.insert(0, str(source / "gguf-py"))
import gguf

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16)
SIZES |= dict(num_attention_heads=2, num_key_value_heads=2)
TOWER = dict(hidden_size=32, intermediate_size=48, patch_size=4)


def convert(checkpoint):
    images = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (checkpoint / "preprocessor_config.json").write_text(json.dumps(images))
    target = checkpoint / "mmproj.gguf"
    script = [str(source / "convert_hf_to_gguf.py"), str(checkpoint), "--mmproj"]
    command = [sys.executable, *script, "--outtype", "f32", "--outfile", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    return target if done.returncode == 0 else done.stderr.splitlines()[-1]


tower = TOWER | dict(num_hidden_layers=1, num_attention_heads=2, image_size=16, vision_use_head=False)
config = transformers.Gemma3Config(text_config=SIZES, vision_config=tower, mm_tokens_per_image=4)
transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder / "gemma3")
said = convert(folder / "gemma3")
print("Gemma 3:", said)
assert "Can not map tensor 'vision_tower.embeddings" in str(said)

rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
text = SIZES | {"rms_norm_eps": 1e-3, "rope_parameters": rope}
tower = TOWER | dict(depth=1, num_heads=2, out_hidden_size=32, num_position_embeddings=16)
tower |= {"deepstack_visual_indexes": [0]}
config = transformers.Qwen3VLConfig(text_config=text, vision_config=tower)
model = transformers.Qwen3VLForConditionalGeneration(config)
model.save_pretrained(folder / "qwen3vl")
used = model.model.visual.blocks[0].norm1.eps
found = gguf.GGUFReader(convert(folder / "qwen3vl"))
stored = float(found.fields["clip.vision.attention.layer_norm_epsilon"].contents())
print(f"Qwen3-VL's tower: {used:.0e} in transformers, {stored:.0e} in the file")
assert (used, round(stored, 6)) == (1e-6, 1e-3)
PYTHON
"$folder/venv/bin/python" "$folder/convert.py" "$folder" 2>/dev/null
# Output:
#   Gemma 3: ValueError: Can not map tensor 'vision_tower.embeddings.patch_embedding.bias'
#   Qwen3-VL's tower: 1e-06 in transformers, 1e-03 in the file
