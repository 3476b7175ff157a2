"""Find a model's structure by running it on the meta device and watching what it calls.

Nothing here knows an architecture. Hooks see the modules; a function mode sees additions, norms and
softcaps that are no modules. Each tensor has sources: the boxes that it was computed from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from dataclasses import replace as with_fields
from types import SimpleNamespace
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch import nn
from torch.overrides import TorchFunctionMode

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm, RMSNorm
from engine.layers.state import new_states, state_specs
from engine.models.base import Model
from engine.offline.equal_blocks import without_equal_blocks
from engine.ops.state_runs import StateRuns
from engine.protocol.structure import AttentionFacts, ModelBox, ModelStructure

TOKENS = 5  # of the run; shapes leave them out
ADDITIONS = {"add", "__add__", "sub", "__sub__"}
DIVISIONS = {"div", "__truediv__", "true_divide"}
NORMS = {"rms_norm", "layer_norm"}
Sources = frozenset[int]


def structure_of(module: nn.Module, head: nn.Module | None = None) -> ModelStructure:
    """Return the structure of a model whose parameters are on the meta device.

    `head` is its prediction head, which becomes its part "mtp"; None if it does not draft.
    """
    if head is not None:
        module.add_module("mtp", head)
    trace = _Trace(module)
    model, batch = cast(Model, module), _batch(module)
    with torch.no_grad(), trace.hooks(), trace:
        if hasattr(module, "encode"):
            model.encode(batch)
        if hasattr(module, "logits"):
            hidden = model.forward(batch)
            model.logits(hidden)
            if head is not None:
                model.logits(head(batch.input_ids, hidden, batch))
    boxes = without_equal_blocks(trace.finished())
    attention, wavelengths = {}, {}
    for name, layer in module.named_modules():
        if isinstance(layer, Attention):
            attention[name] = _attention_facts(layer.spec)
        frequencies = getattr(layer, "frequencies", None)
        if isinstance(frequencies, torch.Tensor):
            turning = [value for value in frequencies.tolist() if value]
            wavelengths[name] = tuple(2 * math.pi / value for value in turning)
    return ModelStructure(tuple(boxes), dict(_settings(model.config)), attention, wavelengths)


def _batch(module: nn.Module) -> ForwardBatch:
    """Return a batch of TOKENS tokens without a KV cache."""
    ids = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    specs = state_specs(module)
    states = new_states(specs, 0, torch.float32, ids.device)
    kv = SimpleNamespace(layers=_AnyLayer(), states=states)
    batch = ForwardBatch(ids, ids, ids, cast(Any, kv), cast(Any, _NoAttention()), TOKENS)
    if not specs:
        return batch
    return with_fields(batch, runs=StateRuns.of_text(TOKENS, ids.device))


class _AnyLayer:
    def __getitem__(self, index: int) -> None:
        return None


class _NoAttention:
    """An AttentionPlan that computes shapes only."""

    def attend(
        self, spec: AttentionSpec, kv: None, q: torch.Tensor, *others: torch.Tensor | None
    ) -> torch.Tensor:
        return q[..., : spec.result_dim].clone()

    def store(self, kv: None, k: torch.Tensor, v: torch.Tensor) -> None:
        pass


class _Trace(TorchFunctionMode):
    """Makes a box for each call of a module, and for each operation that deserves one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.boxes: list[ModelBox] = []
        self._modules = dict(module.named_modules())
        self._names = {layer: name for name, layer in self._modules.items()}
        self._owners = {
            id(parameter): name.rpartition(".")[0] for name, parameter in module.named_parameters()
        }
        self._running: list[tuple[str, int]] = [("", -1)]  # modules and their boxes; innermost last
        self._first: dict[str, int] = {}  # index of the first box of a module
        self._sources: dict[int, Sources] = {}  # by the id of a tensor
        self._divisors: dict[int, float] = {}  # by the id of a tensor that was divided by a number
        self._kept: list[torch.Tensor] = []  # so that no id is used twice

    @property
    def _inside(self) -> str:
        """The name of the innermost module that runs."""
        return self._running[-1][0]

    # ---- modules -----------------------------------------------------------------------------

    def hooks(self) -> ExitStack:
        """Watch the calls of all modules until the stack is closed."""
        stack = ExitStack()
        for layer in self._modules.values():
            before = layer.register_forward_pre_hook(self._enter, with_kwargs=True)
            after = layer.register_forward_hook(self._leave)
            stack.callback(before.remove)
            stack.callback(after.remove)
        return stack

    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[layer]
        self._running.append((name, self._make(name, self._sources_of(_tensors((args, kwargs))))))

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        name, index = self._running.pop()
        tensors = list(_tensors(output))
        self._fill(index, tensors[-1])
        is_block = name.rpartition(".")[2].isdigit()
        if is_block:
            return  # what follows reads the parts of a block
        for tensor in tensors:
            self._set(tensor, frozenset([index]))

    def _make(self, name: str, sources: Sources) -> int:
        """Add a box for a module and return its index. Parameters count in the first box."""
        layer, index = self._modules[name], len(self.boxes)
        is_first = self._first.setdefault(name, index) == index
        own = sum(p.numel() for p in layer.parameters(recurse=False)) if is_first else 0
        box = ModelBox(
            name,
            type(layer).__name__,
            own,
            inputs=tuple(sorted(sources)),
            detail=_parts(layer),
            attention=_attention_facts(layer.spec) if isinstance(layer, Attention) else None,
        )
        self.boxes.append(box)
        return index

    def _fill(self, index: int, output: torch.Tensor, **more: Any) -> None:
        self.boxes[index] = replace(self.boxes[index], shape=tuple(output.shape[1:]), **more)

    def finished(self) -> list[ModelBox]:
        """Return the boxes, with those of modules whose parameters nothing was seen to read.

        These are the tower of a model that sees, for example. Its blocks have boxes, too.
        """
        for name, layer in self._modules.items():
            is_block = name.rpartition(".")[2].isdecimal()
            if name not in self._first and list(layer.parameters(recurse=is_block)):
                self._make(name, frozenset())
        return self.boxes

    # ---- operations --------------------------------------------------------------------------

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, and note what its results were computed from."""
        args, kwargs = tuple(args), kwargs or {}
        name = getattr(function, "__name__", "")
        output = function(*_on_meta(args), **_on_meta(kwargs))
        results, given = list(_tensors(output)), list(_tensors((args, kwargs)))
        if not results or not given:
            return output
        sources = self._sources_of(given)
        self._note_shared(given)
        box = self._operation(name, given, results[0])
        for tensor in results:
            self._set(tensor, sources if box is None else frozenset([box]))
        if name in DIVISIONS and isinstance(args[1], float):
            self._divisors[id(results[0])] = args[1]
        return output

    def _note_shared(self, given: Sequence[torch.Tensor]) -> None:
        """Add to the inputs of a layer the modules whose parameters it reads as its own."""
        inside, index = self._running[-1]
        owners = {self._owners.get(id(tensor), inside) for tensor in given} - {inside}
        is_layer = not list(self._modules[inside].children())
        if is_layer and owners:
            inputs = {self._first[owner] for owner in owners} | {*self.boxes[index].inputs}
            self.boxes[index] = replace(self.boxes[index], inputs=tuple(sorted(inputs)))

    def _operation(
        self, name: str, given: Sequence[torch.Tensor], result: torch.Tensor
    ) -> int | None:
        """Return the index of a box for a call of torch, or None if it deserves none."""
        layer = self._modules[self._inside]
        if name in ADDITIONS and len(given) == 2 and self._joins_layers(layer, given, result):
            # The next block's norm adds the output of the last layer of a block.
            parent, added = self._inside, self._sources_of(given[1:])
            if len(added) == 1:
                parent = self.boxes[min(added)].name.rpartition(".")[0]
            return self._add(parent, "add", given, result)
        if name in NORMS and not isinstance(layer, RMSNorm | LayerNorm):
            return self._norm(given, result)
        if name == "tanh" and not self._inside and id(given[0]) in self._divisors:
            return self._add("", "softcap", given, result, f"{self._divisors[id(given[0])]:g}")
        return None

    def _joins_layers(
        self, layer: nn.Module, given: Sequence[torch.Tensor], result: torch.Tensor
    ) -> bool:
        """Whether an addition joins outputs of layers.

        Those of an activation, and of the experts of a token, are details.
        """
        has_containers = any(list(child.children()) for child in layer.children())
        is_whole = given[0].shape == result.shape and result.dim() > 1
        first, second = (self._sources_of([x]) for x in given)
        return has_containers and is_whole and bool(first and second) and first != second

    def _norm(self, given: Sequence[torch.Tensor], result: torch.Tensor) -> int:
        """Return the box of a norm that was called as a function: its module's, if it has one."""
        weights = self._sources_of(given[1:])
        if not weights:
            return self._add(self._inside, "norm", given, result)
        index, sources = min(weights), self._sources_of(given[:1])
        if self.boxes[index].shape:  # called before
            index = self._make(self.boxes[index].name, sources)
        self._fill(index, result, inputs=tuple(sorted(sources)))
        return index

    def _add(
        self,
        parent: str,
        kind: str,
        given: Sequence[torch.Tensor],
        result: torch.Tensor,
        detail: str = "",
    ) -> int:
        """Add a box for an operation and return its index."""
        index = len(self.boxes)
        name = f"{parent}.{kind} {index}".lstrip(".")
        inputs = tuple(sorted(self._sources_of(given)))
        self.boxes.append(ModelBox(name, kind, 0, tuple(result.shape[1:]), inputs, detail=detail))
        return index

    # ---- sources -----------------------------------------------------------------------------

    def _sources_of(self, tensors: Iterable[torch.Tensor]) -> Sources:
        found: set[int] = set()
        for tensor in tensors:
            owner = self._owners.get(id(tensor))
            if owner is None:
                found |= self._sources.get(id(tensor), frozenset())
            elif owner != self._inside or not owner:  # not a module's own parameters
                if owner not in self._first:
                    self._make(owner, frozenset())
                found.add(self._first[owner])
        return frozenset(found)

    def _set(self, tensor: torch.Tensor, sources: Sources) -> None:
        self._sources[id(tensor)] = sources
        self._kept.append(tensor)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _on_meta(value: Any) -> Any:
    """Return `value` with its tensors on the meta device: tables are made on the CPU."""
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else value.to("meta")
    if isinstance(value, dict):
        return {key: _on_meta(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_meta(item) for item in value)
    return value


def _attention_facts(spec: AttentionSpec) -> AttentionFacts:
    return AttentionFacts(
        kind=spec.kind,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        has_relative_bias=spec.relative is not None,
    )


def _parts(layer: nn.Module) -> str:
    """Return the named parts of a stacked linear layer with their sizes."""
    if not isinstance(layer, Linear):
        return ""
    sizes = [
        f"{name} {rows.stop - rows.start}"
        for name, rows in layer.tensors.slices.items()
        if name and not name.isdigit()  # whole experts have no names
    ]
    return ", ".join(sizes)


def _settings(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a model's config."""
    for name, value in asdict(config).items():
        if isinstance(value, dict):
            yield name, ", ".join(f"{key} {item}" for key, item in value.items())
        elif isinstance(value, tuple) and len(set(value)) == 1:
            yield name, f"{value[0]} ({len(value)} times)"
        else:
            yield name, value.__name__ if isinstance(value, type) else str(value)
