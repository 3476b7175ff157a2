"""The served API against its own /openapi.json: bodies that fit the schema, and that do not.

For each route 1,000 cases: no 5xx, no undocumented answer, a valid body is accepted and an invalid
one refused. `schemathesis_hooks.py` has what JSON Schema cannot say.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import schemathesis_hooks
from tests.server.conftest import byte_tokenizer
from tests.support.serve import Server, serving
from tests.support.tiny_bert import tiny_bert

DEMO = Path(__file__).resolve().parents[2] / "engine" / "demo" / "model"
CASES = 1000
POSITIONS = 16384  # schemathesis writes texts of some thousand characters
ENCODER_PATHS = (
    *("/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/embed", "/pooling", "/embedding"),
    *("/v1/embed", "/embed", "/info"),
)
# The first takes the bodies of other routes, the second needs tokens that the demo lacks.
LEFT_OUT = ("/invocations", "/infill")
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "negative_data_rejection"),
    *("positive_data_acceptance", "unsupported_method", "missing_required_header"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture
def generator(tmp_path: Path) -> Iterator[Server]:
    """The demo with room for long prompts. It was not trained for them, which does not matter."""
    folder = shutil.copytree(DEMO, tmp_path / "demo")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = POSITIONS
    (folder / "config.json").write_text(json.dumps(config))
    batches = ("--batch-dir", tmp_path / "batches")
    with serving(folder, "--no-access-log", "--max-body-bytes", 2**27, *batches) as server:
        yield server


@pytest.fixture
def encoder(tmp_path: Path) -> Iterator[Server]:
    folder = tiny_bert(tmp_path / "bert", max_position_embeddings=POSITIONS)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    with serving(folder, "--allow-dimensions") as server:
        yield server


def conform(server: Server, folder: Path, *selected: str) -> None:
    engine = server.engine.pid
    command = [Path(sys.executable).with_name("schemathesis"), "run"]
    command += [f"{server.base_url}/openapi.json", "--max-examples", str(CASES)]
    command += ["--mode", "all", "--phases", "examples,coverage,fuzzing", "--workers", "1"]
    command += ["--checks", ",".join(CHECKS), "--continue-on-failure", "--no-shrink", *selected]
    command += ["--generation-database", "none", "--request-timeout", "120", "--no-color"]
    command += ["--suppress-health-check", "all"]
    hooks = schemathesis_hooks.__name__
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": hooks, "PYTHONPATH": root}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    [count] = re.findall(r"([\d,]+) generated", done.stdout)
    assert int(count.replace(",", "")) > CASES
    assert server.engine.pid == engine
    server.wait_idle()


def test_generating_routes_conform_to_schema(generator: Server, tmp_path: Path) -> None:
    excluded = [word for path in (*ENCODER_PATHS, *LEFT_OUT) for word in ("--exclude-path", path)]
    conform(generator, tmp_path, *excluded)


def test_encoding_routes_conform_to_schema(encoder: Server, tmp_path: Path) -> None:
    included = [word for path in ENCODER_PATHS for word in ("--include-path", path)]
    conform(encoder, tmp_path, *included)
