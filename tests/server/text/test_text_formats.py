"""The texts of formats: what the expressions take, and what llguidance makes of them."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import uuid

import llguidance
import pytest

from server.text.guided_schema import guided
from server.text.text_formats import FORMATS

GOOD = {
    "date": ["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31", "2023-04-30"],
    "time": ["23:59:59Z", "00:00:00.5+05:30"],
    "date-time": ["2024-02-29T12:00:00Z", "1999-12-31T23:59:59.123-23:59"],
    "duration": ["P1D", "PT5M", "P3W", "P1Y2M3DT4H5M6S", "P1DT1H"],
    "email": ["a@b.c", "first.last@sub.example.org"],
    "hostname": ["localhost", "a-b.example"],
    "ipv4": ["0.0.0.0", "255.249.199.9"],
    "ipv6": ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1::8", "1:2:3:4:5:6:7::", "fe80::a:b"],
    "uri": ["http://a", "mailto:x@y.z", "https://a.b/c?d=e&f#g", "a:/%20"],
    "uuid": ["12345678-9abc-def0-1234-56789abcdef0"],
}
BAD = {
    "date": ["0000-01-01", "2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "2023-1-1"],
    "time": ["23:59:60Z", "24:00:00Z", "12:00:00", "12:00:00+24:00"],
    "date-time": ["2023-02-29T00:00:00Z", "2023-01-01 00:00:00Z", "2023-01-01T00:00:60Z"],
    "duration": ["P", "PT", "P1DT", "P1W2D", "1D", "P1M1Y"],
    "email": ["a", "@b.c", "a@b", "a b@c.d", "a@-b.c"],
    "hostname": ["-a", "a_b", "a..b", ""],
    "ipv4": ["256.1.1.1", "01.2.3.4", "1.2.3"],
    "ipv6": ["1::2::3", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7", ":1", "1:2:3:4:5:6:7:8::"],
    "uri": ["a b", "http", ":a", "a:%2"],
    "uuid": ["12345678-9abc-def0-1234-56789abcdef", "12345678_9abc_def0_1234_56789abcdef0"],
}
READERS = {
    "date": datetime.date.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
}


def allows(schema: dict[str, str], text: str) -> bool:
    """Return whether the grammar that we give the library allows a text."""
    tokenizer = llguidance.LLTokenizer("byte")
    source = json.dumps(guided(schema, {}))
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(source))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(json.dumps(text))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("format", FORMATS)
def test_format_takes_its_texts_only(format: str) -> None:
    assert FORMATS.keys() == GOOD.keys() == BAD.keys()
    pattern = re.compile(FORMATS[format])
    assert [text for text in GOOD[format] if not pattern.fullmatch(text)] == []
    assert [text for text in BAD[format] if pattern.fullmatch(text)] == []
    if format in READERS:
        for text in GOOD[format]:
            READERS[format](text)


@pytest.mark.parametrize("format", FORMATS)
def test_what_we_take_the_library_takes_too(format: str) -> None:
    schema = {"type": "string", "format": format}
    assert [text for text in GOOD[format] if not allows(schema, text)] == []


@pytest.mark.parametrize("format", ["date", "time", "date-time"])
def test_dates_that_readers_refuse_are_not_generated(format: str) -> None:
    schema = {"type": "string", "format": format}
    assert [text for text in BAD[format] if allows(schema, text)] == []


def test_date_keeps_the_pattern_of_its_schema() -> None:
    schema = {"type": "string", "format": "date", "pattern": "-02-"}
    assert allows(schema, "2024-02-29")
    assert not allows(schema, "2023-02-29")
    assert not allows(schema, "2024-03-01")
