"""The inside of reference models, for tests of the lens.

`inside_of_transformers` reads it through transformers' own outputs and through hooks on its norms;
`inside_of_naive` from the steps of the naive nanochat. Everything is for one text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.inspect.lens import look
from engine.protocol.lens import AttentionWeights, LensRequest, LensResult
from engine.runner.model_runner import ModelRunner
from tests.support.naive_nanochat import Naive

# The norms of a stack in transformers, in no order: hooks find their order.
PRE_NORMS = (
    r"(input_layernorm|pre_feedforward_layernorm|ln_1|ln_2|ln_f)$",
    r"(operator_norm|ffn_norm|embedding_norm)$",
    r"^((model|language_model)\.)?norm$",
    r"layer\.\d\.layer_norm$",
    r"final_layer_norm$",
)
AFTER_ATTENTION = r"post_attention_layernorm$"  # unless there is one before the MLP, too
POST_NORMS = (r"self_attn_layer_norm$", r"encoder_attn_layer_norm$", r"final_layer_norm$")
# Modules whose outputs join the stream, of models in which two norms do not show it.
OLMO = r"post_(attention|feedforward)_layernorm$"
SUBLAYERS = {
    "olmo2": OLMO,
    "olmo3": OLMO,
    "cohere": r"(self_attn\.o_proj|mlp\.down_proj)$",
    "cohere2": r"(self_attn\.o_proj|mlp\.down_proj)$",
    "exaone4": r"post_(attention|feedforward)_layernorm$",
    "stablelm": r"(self_attn\.o_proj|mlp\.down_proj)$",
    "gpt_neox": r"(attention\.dense|mlp\.dense_4h_to_h)$",
    "modernbert": r"(attn|mlp)\.Wo$",
    "gemma4_text": r"post_(attention_layernorm|feedforward_layernorm|per_layer_input_norm)$",
}
RECURRENT = ("conv", "linear_attention")  # in a config's layer_types
BERT_NORMS = (r"layer\.\d+\.attention\.output\.LayerNorm$", r"layer\.\d+\.output\.LayerNorm$")
ROTARY_BERT = (r"post_(attention|mlp)_layernorm$",)
# Model type of each encoder -> the norms of its stack.
ENCODERS = {
    "bert": BERT_NORMS,
    "roformer": BERT_NORMS,
    "xlm-roberta": BERT_NORMS,
    "distilbert": (r"layer\.\d+\.(sa|output)_layer_norm$",),
    "mpnet": (r"layer\.\d+\.(attention|output)\.LayerNorm$",),
    "nomic_bert": ROTARY_BERT,
    "gte": ROTARY_BERT,
    "jina_embeddings_v3": ROTARY_BERT,
    "modernbert": (r"layers\.[1-9]\.attn_norm$", r"(mlp|final)_norm$"),
}


def is_encoder(config: Any) -> bool:
    return config.model_type in ENCODERS or getattr(config, "use_bidirectional_attention", False)


@dataclass
class Stream:
    """The residual stream of one stack: the input and output of each norm, [T, hidden] each.

    `joins` are the pairs (sublayer's output, stream before it).
    """

    norms: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    joins: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


@dataclass
class Inside:
    """Attention, streams and logits of a reference model for one text."""

    attention: dict[str, list[torch.Tensor]]  # by stack: [heads, queries, keys] of each layer
    streams: dict[str, Stream]
    logits: list[torch.Tensor] = field(default_factory=list)  # [T, V] after 0, 1, … all layers
    recurrent: set[int] = field(default_factory=set)  # layers without attention


def run_lens(runner: ModelRunner, tokens: Sequence[int], **more: Any) -> LensResult:
    """Return the result of a lens, computed at once."""
    *pieces, result = look(runner, LensRequest(7, list(tokens), **more))
    assert pieces == [None] * len(pieces)
    assert result is not None
    assert not result.error
    return result


def unpacked(layer: AttentionWeights, data: bytes | None = None) -> torch.Tensor:
    """Return weights [heads, queries, keys]; those that a causal layer omits are 0."""
    values = torch.frombuffer(bytearray(layer.weights if data is None else data), dtype=torch.float)
    if layer.stack != "decoder":
        return values.view(layer.heads, layer.queries, layer.keys)
    whole = torch.zeros(layer.heads, layer.queries, layer.keys)
    whole[:, torch.ones(layer.queries, layer.keys).tril().bool()] = values.view(layer.heads, -1)
    return whole


# ---- transformers --------------------------------------------------------------------------------


@torch.inference_mode()
def inside_of_transformers(reference: Any, inputs: dict[str, torch.Tensor]) -> Inside:
    names = [name for name, _ in reference.named_modules()]
    kind = reference.config.model_type
    is_post_norm = kind == "marian" or (kind in ENCODERS and kind != "modernbert")
    patterns = list(PRE_NORMS)
    if kind in ENCODERS:
        patterns = list(ENCODERS[kind])
    elif is_post_norm:
        patterns = list(POST_NORMS)
    elif not any("pre_feedforward" in name for name in names):
        patterns.append(AFTER_ATTENTION)
    if sublayers := SUBLAYERS.get(kind):
        patterns.append(sublayers)
    with _recorded(reference, patterns) as norms:
        found = reference(**inputs, output_attentions=True, output_hidden_states=True)
    return _inside(reference, found, norms, is_post_norm=is_post_norm)


@contextmanager
def _recorded(reference: Any, patterns: Sequence[str]) -> Iterator[list[tuple[str, Any, Any]]]:
    """Yield a list that gets (name, input, output) of each norm that matches."""
    calls: list[tuple[str, Any, Any]] = []
    hooks = []
    for name, module in reference.named_modules():
        if any(re.search(pattern, name) for pattern in patterns):

            def hook(_: Any, args: Any, output: Any, name: str = name) -> None:
                calls.append((name, args[0][0].clone(), output[0].clone()))

            hooks.append(module.register_forward_hook(hook))
    assert hooks
    yield calls
    for hook in hooks:
        hook.remove()


def _inside(reference: Any, found: Any, calls: list[Any], *, is_post_norm: bool) -> Inside:
    kind = reference.config.model_type
    if kind == "nanochat":  # the first call is that of the embedding
        assert calls[0][0] == "model.norm"
        calls = calls[1:]
    if getattr(reference.config, "is_encoder_decoder", False):
        attention = {
            "encoder": found.encoder_attentions,
            "decoder": found.decoder_attentions,
            "cross": found.cross_attentions,
        }
        hidden = {"encoder": found.encoder_hidden_states, "decoder": found.decoder_hidden_states}
    else:
        stack = "encoder" if is_encoder(reference.config) else "decoder"
        attention, hidden = {stack: found.attentions}, {stack: found.hidden_states}
    streams = {}
    for stack, states in hidden.items():
        own = calls if len(hidden) == 1 else [c for c in calls if f"{stack}." in c[0]]
        if kind in SUBLAYERS:
            buffers = reference.named_buffers()
            scales = [scale for name, scale in buffers if name.endswith("layer_scalar")]
            streams[stack] = _stream_of_outputs(own, SUBLAYERS[kind], states, scales)
        else:
            streams[stack] = _stream(own, states, is_post_norm=is_post_norm)
    inside = Inside({k: [layer[0] for layer in v] for k, v in attention.items()}, streams)
    kinds = getattr(reference.config, "layer_types", None) or []
    inside.recurrent = {layer for layer, one in enumerate(kinds) if one in RECURRENT}
    if "decoder" in hidden:
        last = None if is_post_norm else _module(reference, calls[-1][0])
        *earlier, _ = hidden["decoder"]
        for state in earlier:
            inside.logits.append(head(reference, state[0] if last is None else last(state)[0]))
        inside.logits.append(found.logits[0])
    return inside


def _stream(calls: list[Any], states: Sequence[torch.Tensor], *, is_post_norm: bool) -> Stream:
    """Return the stream that the norms show, after a check against the hidden states."""
    stream = Stream([(before, after) for _, before, after in calls])
    before = states[0][0]
    if is_post_norm:
        for total, after in stream.norms:
            stream.joins.append((total - before, before))
            before = after
        torch.testing.assert_close(before, states[-1][0])
        return stream
    per_layer = (len(stream.norms) - 1) // (len(states) - 1)
    for layer, state in enumerate(states[:-1]):
        torch.testing.assert_close(stream.norms[per_layer * layer][0], state[0])
    torch.testing.assert_close(stream.norms[-1][1], states[-1][0])
    for (earlier, _), (later, _) in zip(stream.norms, stream.norms[1:], strict=False):
        stream.joins.append((later - earlier, earlier))
    return stream


def _stream_of_outputs(
    calls: list[Any],
    sublayers: str,
    states: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
) -> Stream:
    """Return the stream that the outputs of these modules join; other calls are of its norms.

    `scales` multiply the stream at the end of each layer, if there are any.
    """
    is_output = [bool(re.search(sublayers, name)) for name, *_ in calls]
    pairs = list(zip(is_output, calls, strict=True))
    stream = Stream([(before, after) for found, (_, before, after) in pairs if not found])
    total = states[0][0]
    outputs = [after for found, (_, _, after) in pairs if found]
    per_layer = len(outputs) // (len(states) - 1)
    for number, output in enumerate(outputs):
        if number and number % per_layer == 0 and scales:
            total = total * scales[number // per_layer - 1]
        stream.joins.append((output, total))
        total = total + output
    torch.testing.assert_close(total * scales[-1] if scales else total, stream.norms[-1][0])
    return stream


def _module(reference: Any, name: str) -> Any:
    return dict(reference.named_modules())[name]


def head(reference: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the reference's logits for hidden states after the last norm."""
    config = reference.config.get_text_config()
    if config.model_type == "t5" and config.scale_decoder_outputs:
        hidden = hidden * config.d_model**-0.5
    logits = reference.lm_head(hidden) + getattr(reference, "final_logits_bias", 0)
    logits = logits / getattr(config, "logits_scaling", 1) * getattr(config, "logit_scale", 1)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


# ---- the naive nanochat --------------------------------------------------------------------------


@torch.inference_mode()
def inside_of_naive(naive: Naive, ids: torch.Tensor) -> Inside:
    norms: list[tuple[torch.Tensor, torch.Tensor]] = []
    outputs: list[torch.Tensor] = []
    maps: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Naive, "norm", _noting(Naive.norm, lambda x, y: norms.append((x, y))))
        for name in ("attention", "mlp"):
            note = _noting(getattr(Naive, name), lambda _, y: outputs.append(y))
            patch.setattr(Naive, name, note)
        softmax = torch.Tensor.softmax

        def noting_softmax(scores: torch.Tensor, dim: int) -> torch.Tensor:
            maps.append(softmax(scores, dim))
            return maps[-1]

        patch.setattr(torch.Tensor, "softmax", noting_softmax)
        logits = naive.logits(ids)
    # The norms of queries and keys have three dimensions; the first other one is the embedding's.
    stream = Stream([pair for pair in norms if pair[0].dim() == 2][1:])
    before = [entering for entering, _ in stream.norms[:-1]]
    stream.joins = list(zip(outputs, before, strict=True))
    inside = Inside({"decoder": maps}, {"decoder": stream})
    weight = naive.tensors["lm_head.weight"][: naive.vocab_size]
    streams = [before[0]]
    streams += [outputs[at] + before[at] for at in range(1, len(outputs), 2)][:-1]
    for state in streams:
        capped = torch.tanh(naive.norm(state) @ weight.T / naive.cap)
        inside.logits.append(naive.cap * capped)
    inside.logits.append(logits)
    return inside


def _noting(method: Any, note: Callable[[torch.Tensor, torch.Tensor], None]) -> Any:
    def noting(self: Naive, x: torch.Tensor, *more: Any) -> torch.Tensor:
        result: torch.Tensor = method(self, x, *more)
        note(x, result)
        return result

    return noting
