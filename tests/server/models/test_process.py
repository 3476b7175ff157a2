"""The process of a model: reports over the control socket, limits of keys, and its end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from engine.config import EngineConfig
from server.config import ServerConfig
from server.http.api_keys import ApiKeys
from server.http.errors import ApiError
from server.http.key_limits import ApiKey, KeyLimits
from server.models.control import Start
from server.models.counts import merged
from server.models.limits import UsedTokenReports
from server.models.pool import LoadError
from server.models.process import Launcher, ModelProcess

CHILD = """
import json, socket, sys, time
control = socket.socket(fileno=int(sys.argv[-1]))
stream = control.makefile("rb")
start = json.loads(stream.readline())
for line in json.loads(start["engine"]["model"]):
    control.sendall(json.dumps(line).encode() + b"\\n")
stream.read()
"""


async def child(*reports: dict[str, object], used: list[object] | None = None) -> ModelProcess:
    """Start a process that sends reports and ends with its parent's side of the socket."""
    taken = used if used is not None else []
    launcher = Launcher([sys.executable, "-c", CHILD], taken.append)
    engine = EngineConfig(model=json.dumps(reports))
    return await launcher.start(Start(ServerConfig(drain_timeout=0), engine, "/no/socket"))


async def test_reports_of_a_model_reach_the_parent() -> None:
    used: list[object] = []
    process = await child(
        {"type": "Loading", "stage": "reading weights", "fraction": 0.25},
        {"type": "UsedTokens", "tokens": {"digest": 7}},
        {"type": "Loaded"},
        used=used,
    )
    await process.wait_loaded()
    assert process.progress == ("reading weights", 0.25)
    assert used == [{"digest": 7}]
    await process.stop()
    assert not process.is_running


async def test_failure_of_a_load_has_its_reason() -> None:
    process = await child({"type": "Failed", "reason": "model.safetensors is damaged"})
    with pytest.raises(LoadError, match=r"model\.safetensors is damaged"):
        await process.wait_loaded()
    await process.stop()


async def test_killed_process_is_noticed() -> None:
    process = await child()
    psutil.Process(process.pid).send_signal(signal.SIGKILL)
    with pytest.raises(LoadError, match="killed by signal 9"):
        await process.wait_loaded()
    assert await process.wait_ended() == "its process was killed by signal 9"


async def test_program_that_cannot_start_is_a_failed_load(tmp_path: Path) -> None:
    launcher = Launcher([str(tmp_path / "none")], lambda tokens: None)
    with pytest.raises(LoadError, match="cannot be started: No such file"):
        await launcher.start(Start(ServerConfig(), EngineConfig(model="x"), "/no/socket"))


async def test_used_tokens_are_reported_in_sums_and_refuse_nothing() -> None:
    key = ApiKey("secret", KeyLimits(requests_per_minute=1, concurrent_requests=2))
    sent: list[dict[str, int]] = []
    reports = UsedTokenReports(sent.append)
    keys = ApiKeys(lambda: [key, ApiKey("free")], reports.limiter)
    name = keys.find(b"secret")
    assert name == key.digest.hex()
    limiter = keys.limiter(name)
    assert limiter is not None
    for _ in range(3):
        limiter.begin()
        limiter.widen(2, "n")
        limiter.use_tokens(5)
    with pytest.raises(ApiError, match="counts as 3 concurrent requests"):
        limiter.widen(3, "n")
    assert limiter.headers() == {}
    assert sent == []
    await asyncio.sleep(0.15)
    assert sent == [{name: 15}]


def test_merged_metrics_keep_families_together_and_escape_names() -> None:
    text = '# HELP a A.\n# TYPE a gauge\na{x="{"} 1\n# TYPE b counter\nb_total 2\n'
    found = merged("# TYPE own gauge\nown 1\n", [("one", text), ('t"o', text)])
    assert found.splitlines() == [
        "# TYPE own gauge",
        "own 1",
        "# HELP a A.",
        "# TYPE a gauge",
        'a{model="one",x="{"} 1',
        'a{model="t\\"o",x="{"} 1',
        "# TYPE b counter",
        'b_total{model="one"} 2',
        'b_total{model="t\\"o"} 2',
    ]
