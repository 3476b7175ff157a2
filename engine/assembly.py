"""Put the loop together with the parts that work between its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from engine.config import EngineConfig
from engine.core import Endpoint, EngineCore
from engine.grammar.matchers import Matchers
from engine.grammar.requests import ConstrainedRequests
from engine.inspect.inspectors import Inspectors, with_limits
from engine.memory.image_plan import embedding_bytes
from engine.models.base import PredictionHead, has_image_axes, image_encoder, whole_image_tokens
from engine.protocol.ready import Ready
from engine.runner.adapter_loading import Adapters
from engine.runner.capture import IdleCapture
from engine.runner.load import LoadedEngine
from engine.scheduling.between import Between
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.speculation import Drafter
from engine.scheduling.state_slots import StateSlots
from engine.speculative.ngram import ngram_drafter
from engine.speculative.prediction_head import HeadDrafter
from engine.vision.requests import ImageRequests
from engine.vision.seen import SeenImages
from engine.vision.store import ImageStore

if TYPE_CHECKING:
    from engine.kv_store.assemble import OpenStore

# In tokens: see BlockTables. A GPU computes a block faster than the host launches the copies.
COPIED_PART = 16


def make_core(
    config: EngineConfig,
    loaded: LoadedEngine,
    endpoint: Endpoint,
    *,
    depth: int = 0,
) -> EngineCore:
    """Return the loop of a loaded model. See EngineCore for `depth`."""
    runner, facts = loaded.runner, loaded.facts
    assert isinstance(runner.matchers, Matchers)
    states = _states(config, facts)
    if states is not None:
        of_process = runner.gauges
        runner.gauges = lambda: of_process() | states.gauges()
    store = _open_store(config, loaded)
    scheduler = Scheduler(
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        max_model_len=facts.max_model_len,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_num_encoder_tokens=facts.max_num_encoder_tokens,
        image_tokens=facts.image_tokens,
        context_cost=facts.context_cost,
        groups=facts.kv_groups,
        # The queue is unbounded here: the client has applied its limits to whole submissions.
        prefix_caching=config.enable_prefix_caching,
        part_size=COPIED_PART if facts.device == "cpu" else 0,
        hash_key=None if store is None else store.hash_key,
        drafter=_drafter(config, loaded),
        grammars=runner.matchers,
        num_adapter_slots=facts.max_loras,
        states=states,
    )
    images = _image_requests(loaded)
    stored = [] if store is None else [store.part(scheduler)]
    between: list[Between] = [
        ConstrainedRequests(runner.matchers),
        images,
        Adapters(scheduler, runner, endpoint.send),
        *stored,
        IdleCapture(runner),
        Inspectors(scheduler, runner, endpoint.send, images),
    ]
    facts = with_limits(facts, runner.model)
    return EngineCore(scheduler, runner, facts, endpoint, between, depth=depth)


def _image_requests(loaded: LoadedEngine) -> ImageRequests:
    """Return the part that encodes images, if the model sees, or else refuses them."""
    runner = loaded.runner
    store = ImageStore(embedding_bytes(loaded.plan, loaded.facts.max_model_len))
    encoder = image_encoder(runner.model)
    if encoder is None:
        return ImageRequests(None, store, runner.device)
    most_whole = whole_image_tokens(runner.model)
    shows_grids = has_image_axes(runner.model)
    requests = ImageRequests(
        encoder, store, runner.device, most_whole=most_whole, shows_grids=shows_grids
    )
    of_process = runner.gauges
    runner.gauges = lambda: of_process() | requests.gauges()
    runner.embeddings_of_text = requests.embeddings_of_text
    runner.seen_tokens = SeenImages(store, runner.device, sees_whole=most_whole > 0)
    return requests


def _open_store(config: EngineConfig, loaded: LoadedEngine) -> OpenStore | None:
    """Return what keeps blocks in files, with --kv-cache-dir. Raises ConfigError."""
    if config.kv_cache_dir is None:
        return None
    from engine.kv_store.assemble import OpenStore

    return OpenStore(config, loaded)


def _states(config: EngineConfig, facts: Ready) -> StateSlots | None:
    """Return the slots of the states of recurrent layers, if the model has some."""
    if not facts.num_state_slots:
        return None
    limits = facts.num_state_slots, facts.max_num_seqs, facts.block_size
    return StateSlots(*limits, keeps_edges=config.enable_prefix_caching)


def _drafter(config: EngineConfig, loaded: LoadedEngine) -> Drafter | None:
    """Return what drafts tokens: a draft model, the prediction head, or n-grams."""
    if config.speculation == "off":
        return None
    head = loaded.plan.prediction.module
    if head is not None:
        return HeadDrafter(loaded.runner, cast(PredictionHead, head))
    return loaded.drafter or ngram_drafter()
