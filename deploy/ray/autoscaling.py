"""Scale replicas by the engines' queues. Ray's default counts open requests of any size."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from deploy.ray.policies import replicas_wanted


def autoscaling(min_replicas: int, max_replicas: int) -> AutoscalingConfig:
    """Return the autoscaling settings: add a replica after 30 s, remove one after 10 minutes.

    Removal is slow because it loses the KV cache of the replica.
    """
    return AutoscalingConfig(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        policy=AutoscalingPolicy(policy_function="deploy.ray.autoscaling:scale_on_queue"),
        metrics_interval_s=5,
        look_back_period_s=30,
        upscale_delay_s=30,
        downscale_delay_s=600,
    )


def scale_on_queue(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the wanted number of replicas, and an empty state. Ray calls it as its policy."""
    metrics = context.aggregated_metrics or {}
    total = {name: sum(metrics.get(name, {}).values()) for name in ("waiting", "running", "rows")}
    reporting = len(metrics.get("rows", {}))
    return replicas_wanted(context.target_num_replicas, reporting, **total), {}
