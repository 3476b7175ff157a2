"""The JSON of a lens, for POST /ui/api/lens."""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from engine.protocol.generate import Image
from engine.protocol.lens import AttentionWeights, LensRequest, LensResult, Prediction, StateTrace
from server.glassbox.lens.attention_maps import floats
from server.text.tokenizer import Tokenizer


def lens_report(
    tokenizer: Tokenizer, request: LensRequest, result: LensResult, want: Collection[str]
) -> dict[str, Any]:
    """Return the parts in `want` and the logit lens, if there is one.

    `pieces` has the text of every token id in the answer.
    """
    report: dict[str, Any] = {"tokens": request.tokens, "source": request.source}
    shown = {*request.tokens, *request.source}
    if "thumbs" in want:
        report["attention"] = _attention(result.attention)
    if "residual" in want:
        report["residual"] = _residual(result)
    if "predictions" in want:
        report["predictions"] = [_prediction(found) for found in result.predictions]
        shown |= _ids(result.predictions)
    if result.states:
        report["states"] = [_state(trace) for trace in result.states]
    if request.positions:
        report["logit"] = [
            [found.layer, found.position, found.entropy, found.top] for found in result.logit_lens
        ]
        shown |= _ids(result.logit_lens)
    report["pieces"] = {str(token): tokenizer.token_text(token) for token in sorted(shown)}
    return report


def shown_images(
    images: Sequence[Image], grids: Sequence[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return where each image is in the text, and where its tokens are on the picture.

    `runs` are its tokens as [first, count], and `grids` are `PatchGrid` of `server.images`.
    """
    found = []
    for image, parts in zip(images, grids, strict=True):
        height, width = image.size
        found.append({"runs": image.runs, "width": width, "height": height, "grids": parts})
    return found


def _ids(predictions: Iterable[Prediction]) -> set[int]:
    return {token for found in predictions for token, _ in found.top}


def _prediction(found: Prediction) -> dict[str, Any]:
    actual = None
    if found.actual is not None:
        actual = {"p": found.actual[0], "rank": found.actual[1]}
    return {
        "position": found.position,
        "entropy": found.entropy,
        "top": found.top,
        "actual": actual,
    }


def _attention(layers: Sequence[AttentionWeights]) -> dict[str, Any]:
    """Return, by stack, the thumbnails of all heads, layer by layer, as one base64 string."""
    stacks: dict[str, list[AttentionWeights]] = {}
    for layer in layers:
        stacks.setdefault(layer.stack, []).append(layer)
    return {stack: _stack(found) for stack, found in stacks.items()}


def _stack(layers: Sequence[AttentionWeights]) -> dict[str, Any]:
    first = layers[0]
    summaries = [layer.summary for layer in layers if layer.summary is not None]
    return {
        "layers": len(layers),
        "numbers": [layer.layer for layer in layers],
        "heads": first.heads,
        "queries": first.queries,
        "keys": first.keys,
        "windows": [layer.window for layer in layers],
        "softcap": first.softcap,
        "kept": [layer.layer for layer in layers if layer.weights],
        "thumb_rows": summaries[0].thumb_rows,
        "thumb_columns": summaries[0].thumb_columns,
        "thumbs": base64.b64encode(b"".join(one.thumbs for one in summaries)).decode(),
        "flatness": [one.flatness for one in summaries],
        "previous": [one.previous for one in summaries],
        "first": [one.first for one in summaries],
        "induction": [one.induction for one in summaries],
    }


def _state(trace: StateTrace) -> dict[str, Any]:
    """Return the trace of a layer; null for what it does not have, or what is not kept."""
    found: dict[str, Any] = {"layer": trace.layer, "heads": trace.heads}
    arrays = {"norms": trace.norms, "strengths": trace.strengths, "decays": trace.decays}
    for name, array in arrays.items():
        found[name] = floats(array).reshape(trace.heads, -1).tolist() if array else None
    return found


def _residual(result: LensResult) -> list[dict[str, Any]]:
    """Return the updates and norms of each stack, in the order of the computation."""
    found: dict[str, dict[str, Any]] = {}
    for update in result.updates:
        stack = found.setdefault(update.stack, {"stack": update.stack, "updates": [], "norms": []})
        later = update.scale_after_first
        stack["updates"].append(
            {
                "layer": update.layer,
                "kind": update.kind,
                "scale": update.scale,
                "scale_after_first": None if math.isnan(later) else later,
                "scales": floats(update.scales).tolist(),
            }
        )
    for norm in result.norms:
        before, after = floats(norm.before).tolist(), floats(norm.after).tolist()
        found[norm.stack]["norms"].append({"name": norm.name, "before": before, "after": after})
    return list(found.values())
