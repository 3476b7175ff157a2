"""/v1/files: uploads, owners, limits and hostile forms."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from server.batch.files import FileStore
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, serving

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}\n'


@pytest.fixture
async def store(model: Path, tmp_path: Path, says: Any) -> AsyncIterator[Served]:
    engine = FakeEngine(says("Hello!"))
    limits: dict[str, int] = {"max_upload_bytes": 4096, "max_batch_dir_bytes": 6000}
    async with serving(engine, model, batch_dir=str(tmp_path / "dir"), **limits) as served:
        yield served


async def upload(served: Served, content: bytes = LINE, **fields: Any) -> Any:
    data = {"purpose": "batch", **fields}
    files = {"file": (fields.pop("name", "in.jsonl"), content)}
    return await served.http.post("/v1/files", data=data, files=files)


async def test_file_uploaded_by_the_client_is_listed_read_and_deleted(store: Served) -> None:
    made = await store.openai.files.create(file=("in.jsonl", LINE), purpose="batch")
    assert (made.bytes, made.filename, made.purpose) == (len(LINE), "in.jsonl", "batch")
    assert (await store.openai.files.retrieve(made.id)).status == "processed"
    assert [file.id async for file in store.openai.files.list()] == [made.id]
    content = await store.openai.files.content(made.id)
    assert content.content == LINE
    assert content.response.headers["x-content-type-options"] == "nosniff"
    assert (await store.openai.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await store.openai.files.retrieve(made.id)


@pytest.mark.parametrize("asked", ["bytes=0-1", "bytes=x", "bytes=9999-"])
async def test_content_is_whole_with_any_range(store: Served, asked: str) -> None:
    made = (await upload(store)).json()
    path = f"/v1/files/{made['id']}/content"
    response = await store.http.get(path, headers={"range": asked})
    assert (response.status_code, response.content) == (200, LINE)


async def test_files_without_the_flag_are_refused_with_its_name(served: Served) -> None:
    for method, path in (("POST", "files"), ("GET", "files/file-1"), ("GET", "batches")):
        response = await served.http.request(method, f"/v1/{path}")
        assert response.status_code == 404
        assert "--batch-dir" in response.json()["error"]["message"]


async def test_file_of_one_key_is_unknown_to_another(
    model: Path, tmp_path: Path, says: Any
) -> None:
    engine = FakeEngine(says("Hello!"))
    keys = ("one", "two")
    async with serving(engine, model, "one", api_key=keys, batch_dir=str(tmp_path)) as served:
        made = await served.openai.files.create(file=LINE, purpose="batch")
        other = served.openai.with_options(api_key="two")
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        assert not (await other.files.list()).data
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(
                input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
            )


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..\\..\\passwd", "a/../../b", "\r\nset-cookie: x", "", "." * 999]
)
async def test_upload_with_a_hostile_name_stays_in_the_folder(
    store: Served, tmp_path: Path, name: str
) -> None:
    boundary = "xyz"
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    escaped = name.replace("\r\n", "%0D%0A")
    head += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{escaped}"'
    body = head.encode() + b"\r\n\r\n" + LINE + f"\r\n--{boundary}--\r\n".encode()
    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    response = await store.http.post("/v1/files", content=body, headers=headers)
    assert response.status_code == 200
    shown = response.json()["filename"]
    assert shown
    assert not {"/", "\\", "\n"} & set(shown)
    assert len(list((tmp_path / "dir" / "files").glob("file-*.jsonl"))) == 1
    assert os.listdir(tmp_path) == ["dir"]


async def test_upload_beyond_the_limit_is_refused_and_leaves_nothing(
    store: Served, tmp_path: Path
) -> None:
    too_long = LINE * 50
    assert (await upload(store, too_long)).status_code == 413

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 65536

    headers = {"content-type": "multipart/form-data; boundary=xyz"}
    response = await store.http.post("/v1/files", content=chunks(), headers=headers)
    assert response.status_code in (400, 413)
    assert not list((tmp_path / "dir" / "uploads").iterdir())
    assert (await upload(store, b"x" * 4096)).status_code == 200


async def test_upload_to_a_full_store_is_refused_until_a_file_is_deleted(store: Served) -> None:
    first = (await upload(store, b"x" * 4000)).json()
    refused = await upload(store, b"x" * 4000)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "storage_full"
    assert "--max-batch-dir-bytes" in refused.json()["error"]["message"]
    assert (await store.http.delete(f"/v1/files/{first['id']}")).status_code == 200
    assert (await upload(store, b"x" * 4000)).status_code == 200


async def test_upload_beyond_the_number_of_files_is_refused(
    model: Path, tmp_path: Path, says: Any
) -> None:
    engine = FakeEngine(says("Hello!"))
    async with serving(engine, model, batch_dir=str(tmp_path), max_batch_files=2) as served:
        statuses = [(await upload(served)).status_code for _ in range(3)]
    assert statuses == [200, 200, 400]


async def test_upload_limit_does_not_loosen_other_routes(store: Served) -> None:
    padding = "x" * (9 << 20)
    response = await store.http.post("/v1/completions", json={"prompt": padding})
    assert response.status_code == 413
    response = await store.http.post("/v1/batches", json={"input_file_id": padding})
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("text/plain", b"purpose=batch", 415),
        ("multipart/form-data", b"", 400),
        ("multipart/form-data; boundary=", b"", 400),
        ("multipart/form-data; boundary=x", b"", 400),
        ("multipart/form-data; boundary=x", b"garbage", 400),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\na", 400),
        ("multipart/form-data; boundary=x", b"--x--\r\n", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"a: b\r\n" * 9999, 400),
        ("multipart/form-data; boundary=x", b"--x\r\na: " + b"b" * 60000, 400),
    ],
)
async def test_upload_that_is_no_form_is_refused(
    store: Served, kind: str, body: bytes, status: int
) -> None:
    response = await store.http.post("/v1/files", content=body, headers={"content-type": kind})
    assert response.status_code == status


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"},
            "expires_after.seconds",
        ),
        ({"expires_after[seconds]": "7200"}, "expires_after.anchor"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
            "expires_after.seconds",
        ),
    ],
)
async def test_upload_with_a_bad_field_is_refused_by_name(
    store: Served, fields: dict[str, str], param: str
) -> None:
    response = await upload(store, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_upload_without_a_file_and_with_two_is_refused(store: Served) -> None:
    none = await store.http.post("/v1/files", files={"purpose": (None, "batch")})
    assert (none.status_code, none.json()["error"]["param"]) == (400, "file")
    two = [("file", ("a", b"a")), ("file", ("b", b"b"))]
    response = await store.http.post("/v1/files", data={"purpose": "batch"}, files=two)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")


async def test_upload_names_unknown_fields(store: Served) -> None:
    response = await upload(store, colour="red")
    assert response.headers["x-ignored-params"] == "colour"


@pytest.mark.parametrize(("origin", "status"), [("https://evil.example", 403), ("null", 403)])
async def test_upload_from_a_foreign_page_is_refused(
    store: Served, origin: str, status: int
) -> None:
    form = {"data": {"purpose": "batch"}, "files": {"file": ("a", LINE)}}
    response = await store.http.post("/v1/files", headers={"origin": origin}, **form)
    assert response.status_code == status
    own = f"http://127.0.0.1:{store.port}"
    response = await store.http.post("/v1/files", headers={"origin": own}, **form)
    assert response.status_code == 200


async def test_expired_file_is_unknown_and_deleted(
    store: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    made = (await upload(store, **fields)).json()
    assert made["expires_at"] == made["created_at"] + 3600
    later = made["expires_at"] + 1.0
    monkeypatch.setattr("server.batch.files.time.time", lambda: later)
    assert (await store.http.get(f"/v1/files/{made['id']}")).status_code == 404
    await upload(store)
    assert len(list((tmp_path / "dir" / "files").glob("*.jsonl"))) == 1


async def test_list_is_paged_and_checks_its_query(store: Served) -> None:
    made = [(await upload(store)).json()["id"] for _ in range(5)]
    newest = await store.http.get("/v1/files", params={"limit": 2})
    page = newest.json()
    assert [file["id"] for file in page["data"]] == made[:2:-1]
    assert page["has_more"]
    rest = await store.http.get("/v1/files", params={"after": page["last_id"], "colour": "red"})
    assert [file["id"] for file in rest.json()["data"]] == made[2::-1]
    assert not rest.json()["has_more"]
    assert rest.headers["x-ignored-params"] == "colour"
    oldest = await store.http.get("/v1/files", params={"order": "asc", "purpose": "batch"})
    assert [file["id"] for file in oldest.json()["data"]] == made
    for query in ({"limit": "0"}, {"limit": "1_0"}, {"limit": "x"}, {"order": "up"}):
        response = await store.http.get("/v1/files", params=query)
        assert response.status_code == 400
        assert response.json()["error"]["param"] in query
    zero = await store.http.get("/v1/files", params={"limit": "0"})
    assert zero.json()["error"]["message"].endswith("greater than or equal to 1, not 0.")
    unknown = await store.http.get("/v1/files", params={"after": "file-x"})
    assert unknown.json()["error"]["param"] == "after"


@pytest.mark.parametrize("name", ["..", "../lock", "%2e%2e%2flock", "file-x", "lock"])
async def test_id_that_is_a_path_finds_nothing(store: Served, name: str) -> None:
    for path in (f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        response = await store.http.get(path)
        assert response.status_code == 404


async def test_restart_keeps_files_and_drops_unfinished_uploads(
    model: Path, tmp_path: Path, says: Any
) -> None:
    engine = FakeEngine(says("Hello!"))
    async with serving(engine, model, batch_dir=str(tmp_path)) as served:
        made = (await upload(served)).json()
    (tmp_path / "uploads" / "file-cut").write_bytes(b"half")
    (tmp_path / "files" / "file-unknown.jsonl").write_bytes(b"no record")
    async with serving(FakeEngine(says("Hello!")), model, batch_dir=str(tmp_path)) as served:
        found = (await served.http.get("/v1/files")).json()["data"]
        assert found == [made]
        storage = served.app.state.batches.storage
        assert isinstance(storage.files, FileStore)
        assert storage.folder.used.total == len(LINE)
    assert not list((tmp_path / "uploads").iterdir())
    assert len(list((tmp_path / "files").iterdir())) == 2


async def test_file_deleted_while_it_is_read_is_whole_or_not_found(store: Served) -> None:
    """DELETE may come between the look-up and the reading."""
    made = (await upload(store)).json()
    path = f"/v1/files/{made['id']}"
    read, deleted = await asyncio.gather(store.http.get(f"{path}/content"), store.http.delete(path))
    assert deleted.status_code == 200
    assert (read.status_code, read.content) == (200, LINE) or read.status_code == 404
    made = (await upload(store)).json()
    files = store.app.state.batches.storage.files
    files.contents(files.find(made["id"], "")).unlink()
    lost = await store.http.get(f"/v1/files/{made['id']}/content")
    assert lost.status_code == 404
    assert lost.json()["error"]["param"] == "file_id"


async def test_paths_of_files_name_their_methods_and_are_suggested(served: Served) -> None:
    allowed = {"/v1/files": "GET, HEAD, POST", "/v1/files/file-1": "DELETE, GET, HEAD"}
    for path, methods in allowed.items():
        response = await served.http.put(path)
        assert (response.status_code, response.headers["allow"]) == (405, methods), path
    for path in ("/files", "/batches"):
        response = await served.http.post(path, json={})
        assert response.status_code == 404
        assert f"did you mean /v1{path}?" in response.json()["error"]["message"]
