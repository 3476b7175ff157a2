#!/usr/bin/env bash
# sentence-transformers' encode_document never uses a folder's prompt "passage", although it names it.
#
# Surprising: encode_document takes the first of "document", "passage" and "corpus" that the model has.
# Every loaded model has "document", the empty text, so the other two never apply. E5's folders have
# "query" and "passage": encode_query adds its prompt, encode_document adds none.
# Versions: sentence-transformers 6.2.0, transformers 5.24.0, torch 2.13.0.
# Why it matters: documents of such a model are encoded without the prompt it was trained with, and a
# server that is equal to the library must do the same.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet sentence-transformers==6.2.0 transformers==5.24.0

cat >"$folder/passage.py" <<'PYTHON'
import sys

import sentence_transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

print("sentence-transformers", sentence_transformers.__version__)
words = {"[UNK]": 0, "passage": 1, "query": 2, "bread": 3}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
module = StaticEmbedding(tokenizer, embedding_dim=4)
prompts = {"query": "query ", "passage": "passage "}
SentenceTransformer(modules=[module], prompts=prompts).save(sys.argv[1])
model = SentenceTransformer(sys.argv[1])
print("prompts:", dict(sorted(model.prompts.items())))
vectors = {
    "encode_query": model.encode_query("bread"),
    "encode_document": model.encode_document("bread"),
}
for name, found in vectors.items():
    used = [
        prompt for prompt in ("", "query ", "passage ")
        if (abs(found - model.encode(prompt + "bread")) < 1e-6).all()
    ]
    print(f"{name} uses {used}")
    assert used == (["query "] if name == "encode_query" else [""])
PYTHON
"$folder/venv/bin/python" "$folder/passage.py" "$folder/model" 2>/dev/null
# Output:
#   sentence-transformers 6.2.0
#   prompts: {'document': '', 'passage': 'passage ', 'query': 'query '}
#   encode_query uses ['query ']
#   encode_document uses ['']
