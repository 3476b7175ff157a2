#!/usr/bin/env bash
# sentence-transformers renders each text by the chat template of a folder without modules.json.
#
# Surprising: encode("bread") of a chat model embeds a user's turn, with the system prompt and the marks
# of the template. Once saved with modules.json, the folder keeps that in `modality_config`. With
# modules.json and without that key, as in folders of older versions, the text is embedded as it is.
# Versions: sentence-transformers 6.2.0, transformers 5.24.0, torch 2.13.0.
# Why it matters: vectors of a bare decoder differ from those of servers that embed the text.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet sentence-transformers==6.2.0 transformers==5.24.0

cat >"$folder/template.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import sentence_transformers
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

print("sentence-transformers", sentence_transformers.__version__)
folder = Path(sys.argv[1])
words = {word: number for number, word in enumerate(["[UNK]", "[PAD]", "turn", "bread"])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
fast.chat_template = "{% for m in messages %}turn {{ m.content }} {% endfor %}"
config = Qwen3Config(vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1, head_dim=4)
Qwen3ForCausalLM(config).save_pretrained(folder / "bare")
fast.save_pretrained(folder / "bare")


def ids(model):
    found = model.preprocess(["bread"])["input_ids"][0]
    return [list(words)[number] for number in found]


bare = SentenceTransformer(str(folder / "bare"))
bare.save(str(folder / "saved"))
saved = SentenceTransformer(str(folder / "saved"))
path = folder / "saved" / "sentence_bert_config.json"
written = json.loads(path.read_text())
print("modality_config of the saved folder:", sorted(written.pop("modality_config")))
path.write_text(json.dumps(written))
older = SentenceTransformer(str(folder / "saved"))
for name, model, due in (
    ("without modules.json", bare, ["turn", "bread"]),
    ("saved by 6.2.0", saved, ["turn", "bread"]),
    ("without modality_config", older, ["bread"]),
):
    print(f"{name}: {ids(model)}")
    assert ids(model) == due, name
PYTHON
"$folder/venv/bin/python" "$folder/template.py" "$folder" 2>/dev/null
# Output:
#   sentence-transformers 6.2.0
#   modality_config of the saved folder: ['message', 'text']
#   without modules.json: ['turn', 'bread']
#   saved by 6.2.0: ['turn', 'bread']
#   without modality_config: ['bread']
