#!/usr/bin/env bash
# transformers 5.24.0 drops add_bos_token and add_eos_token of tokenizer_config.json if the folder has
# a tokenizer.json: true adds nothing where the post-processor adds nothing, and false removes nothing
# where it adds something. So a folder with add_bos_token: true and no post-processor has no BOS, and
# one with add_eos_token: false and a post-processor that adds EOS has it behind every prompt.
# Two neighbours in the same files: special_tokens_map.json takes precedence over tokenizer_config.json,
# but is not read at all if that has added_tokens_decoder; and a token that tokenizer.json marks as
# special stays left out of texts although added_tokens_decoder, and the attribute, say it is not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
"$folder/venv/bin/python" - "$folder" 2> "$folder/log" <<'PYTHON' || { cat "$folder/log"; exit 1; }
import json, pathlib, shutil, sys
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

root = pathlib.Path(sys.argv[1])
WORDS = ["<unk>", "<s>", "</s>", "<end>", "<tool>", "a"]
ENDS = [("<s>", 1), ("</s>", 2)]
BASE = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


def read(single=None, special_tool=False, mapped=None, **settings):
    model = root / "model"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir()
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([AddedToken("<tool>", special=special_tool, normalized=False)])
    if single:
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ENDS)
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({**BASE, **settings}))
    if mapped:
        (model / "special_tokens_map.json").write_text(json.dumps(mapped))
    return AutoTokenizer.from_pretrained(model)


def tokens(**given):
    tokenizer = read(**given)
    return tokenizer.convert_ids_to_tokens(tokenizer("a").input_ids)


tool = {"content": "<tool>", "special": False, "normalized": False}
marked = read(special_tool=True, added_tokens_decoder={"4": tool})
found = {
    "both flags true, no post-processor": tokens(add_bos_token=True, add_eos_token=True),
    "both flags false, one that adds both": tokens(
        single="<s> $A </s>", add_bos_token=False, add_eos_token=False
    ),
    "eos of special_tokens_map.json": read(mapped={"eos_token": "<end>"}).eos_token,
    "the same with added_tokens_decoder": read(
        mapped={"eos_token": "<end>"}, added_tokens_decoder={}
    ).eos_token,
    "is special, and its text": [
        marked.added_tokens_decoder[4].special,
        marked.decode([5, 4, 5], skip_special_tokens=True),
    ],
}
due = [["a"], ["<s>", "a", "</s>"], "<end>", "</s>", [False, "a a"]]
print("transformers", transformers.__version__)
for name, value in found.items():
    print(f"{name}: {value}")
sys.exit(list(found.values()) != due)
PYTHON
