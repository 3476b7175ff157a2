#!/usr/bin/env bash
# llguidance 1.9.1 holds the numbers of a JSON schema as doubles, without an error.
#
# - {"const": 1234567890123456789} accepts only 1234567890123456768, and so does "enum".
# - {"type": "integer", "exclusiveMinimum": 9007199254740992} accepts 9007199254740992 itself:
#   the library adds 1 to a double.
# - "multipleOf": 0.07 is refused, and the error names another number, 7000000000000001.
# - "format": "path" is refused, although JSON Schema 2020-12 (7.2.3) says that processing of an
#   unknown format must not cease. Unknown keywords are ignored.
#
# It matters to servers with structured output: an id of 64 bits in an enum comes out changed, in an
# answer that the client's own validator then refuses.
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


def accepts(schema, answer):
    """Return whether the grammar of a schema accepts a text, or the error of the schema."""
    source = json.dumps({"grammars": [{"json_schema": schema}]})
    matcher = LLMatcher(tokenizer, source, log_level=0)
    if matcher.is_error():
        return matcher.get_error().splitlines()[0]
    tokens = tokenizer.tokenize_str(answer)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


BIG = 1234567890123456789
SEEN = [
    ({"const": BIG}, str(BIG), False),
    ({"const": BIG}, "1234567890123456768", True),
    ({"enum": [BIG]}, "1234567890123456768", True),
    ({"type": "integer", "exclusiveMinimum": 2**53}, str(2**53), True),
    ({"type": "number", "multipleOf": 0.25}, "0.75", True),
    (
        {"type": "number", "multipleOf": 0.07},
        "0.14",
        "Value for 'multipleOf' has too many digits: 7000000000000001",
    ),
    ({"type": "string", "format": "path"}, '"a"', "Unknown format: path"),
    ({"type": "string", "made-up": "path"}, '"a"', True),
]
for schema, answer, seen in SEEN:
    found = accepts(schema, answer)
    print(f"{json.dumps(schema):60} {answer:24} {found}")
    assert found == seen, f"the behaviour has changed: {seen!r} was seen before"
PYTHON
