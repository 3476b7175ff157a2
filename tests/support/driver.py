"""Run the engine in this process: a loaded model under EngineCore, driven turn by turn."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from _pytest.mark import ParameterSet
from safetensors.torch import save_file
from torch import nn

from engine.assembly import make_core
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.inspect.inspectors import Inspectors
from engine.layers.embedding import LMHead
from engine.layers.experts import ExpertLinear
from engine.layers.latent import HeadsLinear
from engine.layers.linear import Linear
from engine.protocol.embed import EmbedOutput, EmbedRequest
from engine.protocol.generate import (
    Ablation,
    Abort,
    Explain,
    Explained,
    GenerateRequest,
    Image,
    SamplingParams,
    TokenLogprobs,
)
from engine.protocol.message import Message
from engine.protocol.outputs import Admission, EngineStats, Rejected, StepOutputs, TokenOutput
from engine.protocol.wire import ToEngine
from engine.runner.adapter_loading import Adapters
from engine.runner.load import load_engine
from engine.runner.model_runner import ModelRunner
from engine.runner.pending_step import PendingStep
from engine.runner.ranks import Connect, refuse_ranks
from engine.runner.step_graphs import StepGraphs
from engine.scheduling.step import SampledToken, Step
from engine.vision.requests import ImageRequests
from tests.support.tape import TapeRecorder, memory

EAGER: dict[str, dict[str, Any]] = {
    "synchronous": {"depth": 0},
    "overlapped": {"depth": 1},
    "late": {"depth": 1, "late": True},
}
MODES: dict[str, dict[str, Any]] = EAGER | {
    "captured": {"depth": 1, "captured": True},
    "captured-late": {"depth": 1, "late": True, "captured": True},
}
# Largest mixed step that is captured. A tape is slow: it computes each token's whole block table.
CAPTURED_TOKENS = 64
# The extremes, for slow tests: synchronous and eager, or overlapped and captured.
EXTREMES = {name: MODES[name] for name in ("synchronous", "late", "captured-late")}


def each(modes: Mapping[str, dict[str, Any]]) -> list[ParameterSet]:
    """Return `modes` as parameters, plus the Triton backend.

    Triton is marked slow, and so is a mode whose late variant finds what it finds. Without another
    backend a mode has that of Numba, or torch's for captures and encoders.
    """
    kernels = {"depth": 1, "attention_backend": "triton"}
    # The attention scores of a NaN request are all NaN: the interpreter's maximum warns about it.
    marks = [
        pytest.mark.slow,
        pytest.mark.timeout(1200),
        pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
    ]
    slow = pytest.param(kernels, id="triton", marks=marks)
    late = {"overlapped": "late", "captured": "captured-late"}
    found = [
        pytest.param(mode, id=name, marks=[pytest.mark.slow] if late.get(name) in modes else [])
        for name, mode in modes.items()
    ]
    return [*found, slow]


class LatePendingStep:
    """A step that the device has not started; `wait` computes all steps up to it."""

    def __init__(self, step: Step, runner: LateRunner) -> None:
        self.step = step
        self.launched_at = time.monotonic()
        self.result: PendingStep | None = None
        self._runner = runner

    def wait(self) -> list[SampledToken]:
        while self.result is None:
            self._runner.compute_one()
        return self.result.wait()

    def prompt_logprobs(self) -> list[list[TokenLogprobs]]:
        assert self.result is not None, "the core must call wait first"
        return self.result.prompt_logprobs()

    def explained(self) -> list[Explained]:
        assert self.result is not None, "the core must call wait first"
        return self.result.explained()

    def embeddings(self) -> list[EmbedOutput]:
        assert self.result is not None, "the core must call wait first"
        return self.result.embeddings()


Part = TypeVar("Part")


def part_of(core: EngineCore, kind: type[Part]) -> Part:
    """Return the part of this class that works between the steps of `core`."""
    return next(part for part in core.between if isinstance(part, kind))


class LateRunner:
    """A ModelRunner that acts like a slow GPU: it computes a step only when `wait` is called.

    This finds decisions of the host that change the inputs of a step already launched.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._queue: deque[LatePendingStep] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_runner", "_queue"):
            super().__setattr__(name, value)
        else:
            setattr(self._runner, name, value)

    def launch(self, step: Step) -> LatePendingStep:
        self._queue.append(LatePendingStep(step, self))
        return self._queue[-1]

    def results(self, pending: LatePendingStep) -> list[SampledToken]:
        sampled = pending.wait()
        self.matchers.accept(pending.step, sampled)
        return sampled

    def capture_when_idle(self) -> bool:
        assert not self._queue, "captured while steps are in flight"
        return self._runner.capture_when_idle()

    def compute_one(self) -> None:
        pending = self._queue.popleft()
        pending.result = self._runner.launch(pending.step)


class Driver:
    """Submits requests, runs turns and collects outputs. Default: one thread, fp32.

    Invariants are checked after every turn. `depth` and `late` set how far the host runs ahead of
    the device. With `captured`, decode steps and small mixed steps are replayed from a tape. All
    other arguments are EngineConfig fields. `poisoned` is the set of ids of requests whose logits
    become NaN. `connect` is as in load_engine.
    """

    def __init__(
        self,
        model: Path,
        *,
        depth: int = 0,
        late: bool = False,
        captured: bool = False,
        connect: Connect = refuse_ranks,
        **config: Any,
    ) -> None:
        default: dict[str, Any] = {"dtype": "float32", "threads": 1, "device": "cpu"}
        if captured:
            default["attention_backend"] = "torch"  # Numba's kernels need lengths on the host
        self.config = EngineConfig(model=str(model), **(default | config))
        if self.config.attention_backend == "triton":
            from tests.support.interpreter import mend

            mend()
        self.tapes = TapeRecorder() if captured else None
        self.loaded = load_engine(self.config, recorder=self.tapes, connect=connect)
        self.runner = self.loaded.runner
        self.poisoned: set[int] = set()
        if self.runner.kind != "encoder":
            self._poison_logits()
        if self.runner.graphs:
            self._capture_on_demand(self.runner.graphs)
        runner: Any = LateRunner(self.runner) if late else self.runner
        self.core = make_core(self.config, self.loaded._replace(runner=runner), self, depth=depth)
        self.inspectors = part_of(self.core, Inspectors)
        self.adapters = part_of(self.core, Adapters)
        self.loaded = self.loaded._replace(facts=self.core.facts)
        self.inbox: list[ToEngine] = []
        self.sent: list[Message] = []
        self.outputs: dict[int, list[TokenOutput]] = {}
        self.embeddings: dict[int, EmbedOutput] = {}
        self.admissions: dict[int, Admission] = {}
        self.rejected: dict[int, Rejected] = {}
        self.explained: dict[int, dict[int, Explained]] = {}
        self.stats = EngineStats()
        self._ids = 0

    def _poison_logits(self) -> None:
        """Patch the model and its graphs to write NaN into the logits of poisoned requests."""
        launch, graphs = self.runner.launch, self.runner.graphs
        sampling: list[int] = []

        def noting_launch(step: Step) -> PendingStep:
            sampling[:] = [s.id for s in step.slices if s.samples]
            pending = launch(step)
            sampling.clear()  # no NaN in graphs that are captured between steps
            return pending

        def spoilt(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def compute_and_spoil(*given: Any, **named: Any) -> torch.Tensor:
                if "draws" in named and not self.poisoned.isdisjoint(sampling):
                    named["draws"] = False  # the step draws behind what is written here
                result = compute(*given, **named)
                for row, request_id in enumerate(sampling):
                    if request_id in self.poisoned:
                        result[row, 7] = float("nan")
                return result

            return compute_and_spoil

        self.runner.launch = noting_launch  # type: ignore[method-assign]
        self.runner.model.logits = spoilt(self.runner.model.logits)  # type: ignore[method-assign]
        if graphs:
            graphs.compute = spoilt(graphs.compute)  # type: ignore[method-assign]

    def _capture_on_demand(self, graphs: StepGraphs) -> None:
        """Capture a small shape as soon as a step has it; idle turns would take too long."""
        launch = self.runner.launch

        def capturing_launch(step: Step) -> PendingStep:
            shape = graphs.shape_for(step)
            if shape and shape.chunk_tokens <= CAPTURED_TOKENS and not graphs.is_captured(shape):
                graphs.capture(shape)
            return launch(step)

        self.runner.launch = capturing_launch  # type: ignore[method-assign]

    def check_static(self) -> None:
        """Check that graphs were replayed and use only memory that lives as long as the engine."""
        assert self.tapes
        assert self.tapes.replays
        runner, model = self.runner, cast(nn.Module, self.runner.model)
        weights = [*model.parameters(), *model.buffers()]
        adapters = [m.adapters for m in model.modules() if getattr(m, "adapters", None)]
        forms = [m.tensors.packed for m in model.modules() if isinstance(m, Linear | LMHead)]
        packed = [form._packed for form in forms if form is not None]
        experts = [m.tensors for m in model.modules() if isinstance(m, ExpertLinear)]
        packed_forms = [each.packed_experts for each in experts]
        heads = [m.tensors for m in model.modules() if isinstance(m, HeadsLinear)]
        packed_forms += [form for each in heads for form in (each.packed_keys, each.packed_values)]
        packed += [form._packed for each in packed_forms for form in each.weights]
        assert runner.graphs
        inputs = runner.graphs.inputs
        owners = [runner.rows, runner.graphs, inputs, *runner.kv.layers, *adapters]
        state = [getattr(owner, name) for owner in owners for name in _fields(owner)]
        if runner.kv.states is not None:
            state += [part for layer in runner.kv.states for part in layer]
        static = {memory(t) for t in (*weights, *packed, *state) if isinstance(t, torch.Tensor)}
        strange = [t for key, t in self.tapes.outside().items() if key not in static]
        assert not strange, f"a graph uses tensors that may be freed: {strange}"

    # ---- the endpoint of the core ------------------------------------------------------------

    def drain(self, *, block: bool) -> list[ToEngine]:
        assert not (block and self.core.in_flight), "results in flight would wait for a message"
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: Message) -> None:
        self.sent.append(message)
        match message:
            case StepOutputs():
                self.stats = message.stats
                for admission in message.admitted:
                    assert admission.id not in self.admissions, "admitted twice"
                    self.admissions[admission.id] = admission
                for output in message.tokens:
                    assert output.id in self.admissions, "a token before its admission"
                    assert self.finish(output.id) is None, "a token after the end"
                    self.outputs.setdefault(output.id, []).append(output)
                for embedding in message.embeddings:
                    assert embedding.id in self.admissions, "a vector before its admission"
                    assert embedding.id not in self.embeddings, "a second vector"
                    self.embeddings[embedding.id] = embedding
            case Explained():
                self.explained.setdefault(message.id, {})[message.index] = message
            case Rejected():
                self.rejected[message.id] = message

    # ---- calls for tests ---------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 16,
        *,
        arrival: float = 0.0,
        priority: int = 0,
        salt: str = "",
        source: list[int] | None = None,
        adapter: int = 0,
        ablation: Ablation | None = None,
        tenant: str = "",
        images: Sequence[Image] = (),
        **params: Any,
    ) -> int:
        """Queue a request, greedy unless `params` set a temperature; return its id."""
        self._ids += 1
        sampling = SamplingParams(max_tokens, **({"temperature": 0.0} | params))
        given = arrival, priority, salt, source or []
        names: dict[str, Any] = {"adapter": adapter, "tenant": tenant, "ablation": ablation}
        names["images"] = tuple(images)
        self.inbox.append(GenerateRequest(self._ids, prompt, sampling, *given, **names))
        return self._ids

    def explain(
        self,
        prompt: list[int],
        answer: list[int],
        num_candidates: int = 8,
        *,
        salt: str = "",
        source: list[int] | None = None,
        **params: Any,
    ) -> int:
        """Queue the explanation of an answer to `prompt`; `params` are those of `submit`."""
        self._ids += 1
        sampling = SamplingParams(len(answer), **({"temperature": 0.0} | params))
        wanted = Explain(answer, sampling, num_candidates)
        end = SamplingParams(1, temperature=0.0)
        tokens = [*prompt, *answer[:-1]]
        self.inbox.append(
            GenerateRequest(self._ids, tokens, end, 0.0, 0, salt, source or [], wanted)
        )
        return self._ids

    def embed(self, tokens: list[int], **fields: Any) -> int:
        """Queue a text to embed, with these fields of EmbedRequest; return its id."""
        self._ids += 1
        self.inbox.append(EmbedRequest(self._ids, tokens, 0.0, **fields))
        return self._ids

    def vector(self, request_id: int) -> torch.Tensor:
        """Return the embedding of a request, [hidden] fp32."""
        return torch.frombuffer(bytearray(self.embeddings[request_id].vector), dtype=torch.float32)

    def abort(self, *ids: int) -> None:
        self.inbox.append(Abort(list(ids)))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.turn()
            self.core.scheduler.check()
            if not self.core.depth:
                self._check_windows()

    def _check_windows(self) -> None:
        """Check that a windowed group holds at most its window, the step's tokens and 2 blocks."""
        tokens = self.stats.step_prefill_tokens + self.stats.step_decode_tokens
        size = self.core.facts.block_size
        for sequence in self.core.scheduler.running:
            for group, table in zip(self.core.facts.kv_groups, sequence.tables, strict=True):
                held = sum(block > 0 for block in table)
                assert not group.window or held <= -(-(group.window + tokens) // size) + 2

    @property
    def busy(self) -> bool:
        core = self.core
        is_waiting = any(part.is_waiting for part in core.between)
        is_waiting = is_waiting or part_of(core, ImageRequests).has_work
        return bool(self.inbox or core.scheduler.has_work or is_waiting or core.in_flight)

    def run(self, max_turns: int = 20_000) -> None:
        """Run until all requests have ended; check that no block is held and none waits."""
        for _ in range(max_turns):
            if not self.busy:
                break
            self.turn()
        assert not self.busy, "livelock"
        assert (self.stats.running, self.stats.waiting, self.stats.blocks_held) == (0, 0, 0)
        assert self.core.scheduler.pool.num_available == self.core.facts.num_blocks

    def tokens(self, request_id: int) -> list[int]:
        return [output.token for output in self.outputs.get(request_id, [])]

    def logprobs(self, request_id: int) -> list[float]:
        """Return the logprobs of the generated tokens, if they were requested."""
        found = [o.logprobs for o in self.outputs.get(request_id, [])]
        return [entry.logprob for entry in found if entry is not None]

    def finish(self, request_id: int) -> str | None:
        outputs = self.outputs.get(request_id)
        return outputs[-1].finish if outputs else None

    def drawn(self, request_id: int) -> list[int]:
        """Return the tokens that an explanation draws, in the order of the answer."""
        found = self.explained[request_id]
        return [found[index].drawn for index in range(len(found))]

    def cached_tokens(self, request_id: int) -> int:
        return self.admissions[request_id].cached_tokens


def _fields(owner: Any) -> list[str]:
    return list(vars(owner)) if hasattr(owner, "__dict__") else list(owner.__slots__)


def tiny_llama(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a Llama with random weights in Hugging Face layout, small enough for any test."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 600,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    } | overrides
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden) * 4,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": random(config["vocab_size"], hidden) * 2,
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = torch.ones(hidden)
        for name, shape in shapes.items():
            weights[f"{prefix}.{name}.weight"] = random(*shape)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder
