#!/usr/bin/env bash
# llguidance 1.9.1 ends a greedy lexeme only if the next byte alone shows that it has ended.
#
# - /(a|bx)+/ "by" does not accept "aby": at "b" the first lexeme may go on, at "y" it may not, and
#   the lexer cannot go back to the byte before. /a+/ "by" accepts "aby".
# - So a grammar of JSON-escaped texts is not the grammar of the texts with escapes in it: each
#   escape begins with the same backslash. /([^"\\]|\\")+/ "\\n" does not accept x\n.
#
# It matters to servers that hold a text inside a JSON string to a client's grammar: the answer can
# never leave the first lexeme that may contain a quote but no line break.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1

"$folder/venv/bin/python" - <<'PYTHON'
import json

import llguidance
from llguidance import LLMatcher, LLTokenizer

print("llguidance", llguidance.__version__)
tokenizer = LLTokenizer("byte")
SEEN = [
    (r'start: /a+/ "by"', "aby", True),
    (r'start: /(a|bx)+/ "by"', "aby", False),
    (r'start: /[^\n]+/ "\n"', "x\n", True),
    (r'start: /([^"\\]|\\")+/ "\\n"', r"x\n", False),
]
for grammar, text, expected in SEEN:
    source = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    matcher = LLMatcher(tokenizer, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    accepted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    print(f"{grammar!r} {text!r}: {accepted}")
    assert accepted is expected
PYTHON
