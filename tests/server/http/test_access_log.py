"""The access log: what a proxy says of the client."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from server.http.access_log import LONGEST, NAMING, forwarded_for
from server.http.auth import PROXY_HEADERS


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({}, None),
        ({"x-real-ip": "192.0.2.1"}, "192.0.2.1"),
        ({"via": "1.1 proxy"}, "1.1 proxy"),
        ({"via": "1.1 proxy", "x-real-ip": "192.0.2.1"}, "192.0.2.1"),
        ({"x-forwarded-for": "", "forwarded": "for=192.0.2.2"}, "for=192.0.2.2"),
        ({"forwarded": "for=192.0.2.2", "x-forwarded-for": "192.0.2.3"}, "192.0.2.3"),
        ({"cf-connecting-ip": "192.0.2.4"}, "192.0.2.4"),
        ({"via": "v" * 999}, "v" * LONGEST),
        ({"x-forwarded-proto": "https"}, None),
    ],
)
def test_forwarded_for_is_the_most_telling_header(headers: dict[str, str], named: str) -> None:
    assert forwarded_for(Headers(headers)) == named


def test_forwarded_for_reads_every_header_that_makes_a_client_remote() -> None:
    assert set(NAMING) >= PROXY_HEADERS
