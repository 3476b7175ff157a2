#!/usr/bin/env bash
# llguidance 1.9.1: `format: date` allows 29 February in every year and the year 0, and `time` allows
# the second 60 in every minute. An `allOf` or `pattern` beside it is intersected, so a schema can
# refuse them. A Python program cannot read such dates: datetime raises ValueError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1
"$folder/venv/bin/python" - <<'PY'
import datetime
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def allows(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(json.dumps(text))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def exists(text):
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


date = {"type": "string", "format": "date"}
seen = {text: (allows(date, text), exists(text))
        for text in ("2024-02-29", "2023-02-29", "2023-02-30", "0000-10-10")}
for text, (allowed, real) in seen.items():
    print(f"{text}: llguidance {'allows' if allowed else 'refuses'} it, it {'exists' if real else 'does not exist'}")
assert seen == {"2024-02-29": (True, True), "2023-02-29": (True, False),
                "2023-02-30": (False, False), "0000-10-10": (True, False)}
assert allows({"type": "string", "format": "time"}, "12:30:60Z")
assert not allows({**date, "pattern": "^[1-9]"}, "0000-10-10")
assert allows({**date, "pattern": "^[1-9]"}, "2023-02-29")
PY
echo "seen"
