"""`data:` URLs as clients write them."""

from __future__ import annotations

import base64
import io
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import load_image

from server.images import data_url
from server.images.data_url import image_bytes
from server.images.errors import ImageError

DATA = bytes(range(256)) + b"\xff\xfe\xfb"  # its base64 has + and /
TEXT = base64.b64encode(DATA).decode()
URL_SAFE = base64.urlsafe_b64encode(DATA).decode()
LINES = base64.encodebytes(DATA).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:image/PNG;BASE64,{TEXT}",
        f"data:;base64,{TEXT}",
        f"data:,{TEXT}",
        f"data:image/png,{TEXT}",
        f"data:application/octet-stream;base64,{TEXT}",
        f"data:image/png;charset=utf-8;name=a.png;base64,{TEXT}",
        f"data:image/png;base64, {TEXT}\n",
        f"data:image/png;base64,{LINES}",
        f"data:image/png;base64,{LINES}".replace("\n", "\r\n"),
        f"data:image/png;base64,{URL_SAFE}",
        f"data:image/png;base64,{TEXT.rstrip('=')}",
        f"data:image/png;base64,{TEXT.rstrip('=')}====",
        f"data:image/png;base64,{quote(TEXT, safe='')}",
        TEXT,
        f"  {LINES}",
    ],
)
def test_form_that_clients_send_is_read(url: str) -> None:
    assert image_bytes(url) == DATA


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,====", "empty"),
        ("", "empty"),
        ("data:image/png;base64,ab\x00d", r"character '\\x00' after 2 others"),
        ("data:image/png;base64,abcd,efgh", "character ',' after 4 others"),
        ("data:image/png;base64,ab==cd==", "character '=' after 2 others"),
        ("data:image/png;base64,\ud800abc", "after 0 others"),
        ("data:image/png;base64,日本", "character '日' after 0 others"),
        ("data:image/png;base64,abcde", "5 characters encode no whole number of bytes"),
        ("data:image/svg+xml,<svg/>", "character '<'"),
        ("data:image/png,%89PNG%0D%0A", "not valid base64"),
        ("photo.png", "neither a data: URL nor base64"),
        ("data:" + "a" * 2000 + ";base64,abcd", "2012 characters before its comma; the limit is 1"),
    ],
)
def test_text_without_an_image_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        image_bytes(url)


def test_image_above_the_limit_is_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_url, "MAX_IMAGE_BYTES", len(DATA))
    assert image_bytes(TEXT) == DATA
    monkeypatch.setattr(data_url, "MAX_IMAGE_BYTES", len(DATA) - 1)
    with pytest.raises(ImageError, match="has 259 bytes; the limit is 258"):
        image_bytes(TEXT)


@given(st.binary(min_size=1, max_size=300), st.booleans(), st.booleans(), st.booleans())
def test_any_bytes_survive_every_form(data: bytes, safe: bool, padded: bool, lines: bool) -> None:
    text = (base64.urlsafe_b64encode if safe else base64.b64encode)(data).decode()
    text = text if padded else text.rstrip("=")
    if lines:
        text = "\n".join(text[at : at + 7] for at in range(0, len(text), 7))
    assert image_bytes(f"data:image/png;base64,{text}") == data


@given(st.text(max_size=60))
def test_any_text_gives_bytes_or_an_image_error(text: str) -> None:
    try:
        data = image_bytes(text)
    except ImageError:
        return
    assert 0 < len(data) <= len(text)


def test_forms_that_transformers_reads_give_the_same_picture() -> None:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (10, 20, 30)).save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    lines = base64.encodebytes(file.getvalue()).decode()
    forms = [
        *(text, lines, f"data:image/png;base64,{text}", f"data:image/jpeg;base64,{lines}"),
        *(f"data:image/png;charset=utf-8;base64,{text}", f"data:image/png,{text}"),
    ]
    for form in forms:
        ours = Image.open(io.BytesIO(image_bytes(form)))
        assert ours.tobytes() == load_image(form).tobytes()
