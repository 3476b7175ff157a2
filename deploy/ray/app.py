"""Build the Ray Serve application from the same settings as `penstock serve`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from deploy.ray.autoscaling import autoscaling
from deploy.ray.ingress import Ingress
from deploy.ray.policies import POLICIES
from deploy.ray.replica import Replica
from engine.config import EngineConfig
from engine.errors import ConfigError
from server.cli.model_source import resolve_model
from server.config import ServerConfig
from server.settings import load

SPARE = 64  # open requests beyond a replica's rows and queue, for probes and scrapes
HEALTH_PERIOD_S = 5.0


@dataclass(frozen=True)
class Plan:
    """Settings of every replica, their number, and the routing policy (a name in POLICIES)."""

    config: ServerConfig
    engine_config: EngineConfig
    min_replicas: int
    max_replicas: int
    routing: str


def plan(arguments: Mapping[str, Any]) -> Plan:
    """Read `arguments`: settings of `penstock serve` by their YAML keys, and three more.

    These are `min_replicas`, `max_replicas` (both default to 1; a smaller maximum is raised to the
    minimum) and `routing` (default: prefix). Environment variables apply to settings that are not
    in `arguments`. Raises ConfigError.
    """
    settings = {key.replace("-", "_"): value for key, value in arguments.items()}
    routing = settings.pop("routing", "prefix")
    if routing not in POLICIES:
        raise ConfigError(f"routing: {routing!r} is not one of {', '.join(POLICIES)}.")
    least, most = (_count(settings, name) for name in ("min_replicas", "max_replicas"))
    unknown = settings.keys() - {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__}
    if unknown:
        raise ConfigError(f"Unknown settings: {', '.join(sorted(unknown))}. See docs/scaling.md.")
    config, engine_config, _ = load(settings, os.environ, None)
    return Plan(*resolve_model(config, engine_config), least, max(least, most), routing)


def _count(settings: dict[str, Any], name: str) -> int:
    value = str(settings.pop(name, 1))
    if not value.isdecimal() or not int(value):
        raise ConfigError(f"{name}: {value!r} is not a whole number of at least 1.")
    return int(value)


def build(arguments: Mapping[str, Any]) -> Application:
    """Return the application for `plan(arguments)`. A RayService imports this function."""
    wanted = plan(arguments)
    config, engine_config = wanted.config, wanted.engine_config
    quiet = LoggingConfig(enable_access_log=False)  # each replica's app writes an access log
    replicas = serve.deployment(
        Replica,
        autoscaling_config=autoscaling(wanted.min_replicas, wanted.max_replicas),
        # Above the engine's own bounds, so that a full queue is a 503 at once, not a wait in Ray.
        max_ongoing_requests=engine_config.max_num_queued_reqs + engine_config.max_num_seqs + SPARE,
        ray_actor_options={
            "num_cpus": engine_config.threads or 1,
            "num_gpus": int(engine_config.device == "cuda"),
        },
        request_router_config=RequestRouterConfig(
            request_router_class="deploy.ray.router:PolicyRouter",
            request_router_kwargs={"policy": wanted.routing},
        ),
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=config.drain_timeout,
        logging_config=quiet,
    )
    ingress = serve.deployment(
        Ingress,
        max_ongoing_requests=100_000,  # the ingress only waits; the replicas' queues set the limit
        ray_actor_options={"num_cpus": 0},
        logging_config=quiet,
    )
    return ingress.bind(
        replicas.bind(config, engine_config), engine_config.block_size, config.max_body_bytes
    )
