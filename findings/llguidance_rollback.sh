#!/usr/bin/env bash
# llguidance 1.9.1: after a rollback, a mask may allow a token that the grammar does not allow.
#
# The grammar needs one character and a line break after "}]}]". The token of two braces is then in
# the mask, although `validate_tokens` says 0. Only a rollback over tokens for which masks were
# computed does that.
#
# It matters to servers that try drafts of tokens and take them back: the model may draw such a
# token, and the answer then ends with an error.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 tokenizers==0.22.1

"$folder/venv/bin/python" - <<'PYTHON'
import json

import llguidance
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

print("llguidance", llguidance.__version__)
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {char: index for index, char in enumerate(alphabet)}
for pair in ("</", "}}"):
    vocabulary[pair] = len(vocabulary)
model = models.BPE(vocab=vocabulary, merges=[("<", "/"), ("}", "}")])
made = Tokenizer(model)
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
made.decoder = decoders.ByteLevel()
made.add_special_tokens([AddedToken("<eos>", special=True)])
tokenizer = LLTokenizer(made.to_str(), eos_token=made.token_to_id("<eos>"))
GRAMMAR = r"""
start: r0 T0
r0: T0 "</p>"~1..3 r1~1..3 | T1~2 [r1] | "\n"~1..3
r1: "}]"~2 T1 T0 | T0 T1~2 T1~1..3
T0: "\n"
T1: /./
"""
first, brace, bracket, braces = map(vocabulary.get, ("</", "}", "]", "}}"))
DRAFT = [vocabulary["\u010a"], vocabulary["<"]]


def allowed(draft):
    """Return whether two braces are in the mask after the answer, and whether they are valid."""
    source = json.dumps({"grammars": [{"lark_grammar": GRAMMAR}]})
    matcher = LLMatcher(tokenizer, source, log_level=0)
    matcher.consume_token(first)
    matcher.compute_bitmask()
    for token in draft:
        matcher.consume_token(token)
        matcher.compute_bitmask()
    matcher.rollback(len(draft))
    for token in (brace, bracket, brace, bracket):
        matcher.consume_token(token)
    mask = matcher.compute_bitmask()
    in_mask = bool(mask[braces // 8] >> (braces % 8) & 1)
    return in_mask, bool(matcher.validate_tokens([braces]))


for draft in ([], DRAFT):
    print("draft", draft, "in the mask, valid:", allowed(draft))
assert allowed([]) == (False, False)
assert allowed(DRAFT) == (True, False)
PYTHON
