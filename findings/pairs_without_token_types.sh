#!/usr/bin/env bash
# transformers 5: the class of a tokenizer decides the token types of a pair, and perhaps its template.
#
# Surprising: PreTrainedTokenizerFast gives a model no token types, although tokenizer.json has them, and
# save_pretrained of version 4 files named none. BertTokenizer gives types, and replaces the file's template
# of pairs by BERT's.
# Versions: transformers 5.24.0, tokenizers 0.23.3.
# Why it matters: a BERT reranker reads all types as 0 or not, by one word in tokenizer_config.json. The
# scores of the same weights then differ (0.26 and 0.43 in tests/data/cross_encoders.json).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 tokenizers==0.23.3

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer

print("transformers", transformers.__version__)
names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
vocabulary = {name: number for number, name in enumerate(names)}
tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS]:0 $A:0 $B:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
)
found = {}
for kind in ("PreTrainedTokenizerFast", "BertTokenizer"):
    path = Path(sys.argv[1], kind)
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    tokens = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    settings = tokens | {"pad_token": "[PAD]", "tokenizer_class": kind}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    given = AutoTokenizer.from_pretrained(path)("a", "b")
    found[kind] = given["input_ids"], given.get("token_type_ids")
    print(kind, *found[kind])
assert found == {
    "PreTrainedTokenizerFast": ([2, 5, 6], None),
    "BertTokenizer": ([2, 5, 3, 6, 3], [0, 0, 0, 1, 1]),
}
PYTHON
# Output:
#   transformers 5.24.0
#   PreTrainedTokenizerFast [2, 5, 6] None
#   BertTokenizer [2, 5, 3, 6, 3] [0, 0, 0, 1, 1]
