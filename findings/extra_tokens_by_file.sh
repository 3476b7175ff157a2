#!/usr/bin/env bash
# transformers 5.24.0: an object in `extra_special_tokens` is a special token in one file and not in
# the other.
#
# The entry {"content": "<x>"} has no flag `special`. In special_tokens_map.json it is made special,
# and decoding skips it. In tokenizer_config.json (with "__type": "AddedToken", as save_pretrained
# writes it) it is an ordinary added token, and decoding shows it. A dict in tokenizer_config.json
# gives names, also without the ending `_token`; a list in special_tokens_map.json joins the list of
# tokenizer_config.json instead of replacing it.
#
# Output: for each case the texts of extra_special_tokens, and the decoded text without special
# tokens. The script fails if they change.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q --disable-pip-version-check install transformers==5.24.0 tokenizers==0.23.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

WORDS = ["a", "<x>", "<y>", "<unk>"]
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
OBJECT = {"__type": "AddedToken", "content": "<x>", **FLAGS}
CASES = {
    "object in tokenizer_config.json": ({"extra_special_tokens": [OBJECT]}, {}),
    "object in special_tokens_map.json": ({}, {"extra_special_tokens": [{"content": "<x>", **FLAGS}]}),
    "both lists": ({"extra_special_tokens": ["<y>"]}, {"extra_special_tokens": ["<x>"]}),
    "dict": ({"extra_special_tokens": {"boi": "<x>"}}, {}),
}
found = {}
for number, (name, (config, mapped)) in enumerate(CASES.items()):
    folder = Path(sys.argv[1], str(number))
    folder.mkdir()
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if mapped:
        (folder / "special_tokens_map.json").write_text(json.dumps(mapped))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    extra = [str(token) for token in tokenizer.extra_special_tokens]
    found[name] = extra, tokenizer.decode([0, 1, 2], skip_special_tokens=True)
    print(name, *found[name])
assert found == {
    "object in tokenizer_config.json": (["<x>"], "a <x> <y>"),
    "object in special_tokens_map.json": (["<x>"], "a <y>"),
    "both lists": (["<y>", "<x>"], "a"),
    "dict": ([], "a <y>"),
}, found
PYTHON
