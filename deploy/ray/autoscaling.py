"""How many replicas: by our own queue, where Ray's default counts open requests of any size."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from deploy.ray.policies import replicas_wanted


def autoscaling(min_replicas: int, max_replicas: int) -> AutoscalingConfig:
    """Up after half a minute, by one; down after ten quiet ones: a replica's cache is lost."""
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
    """Ray's autoscaling policy: the number of replicas wanted, and no state."""
    metrics = context.aggregated_metrics or {}
    total = {name: sum(metrics.get(name, {}).values()) for name in ("waiting", "running", "rows")}
    reporting = len(metrics.get("rows", {}))
    return replicas_wanted(context.target_num_replicas, reporting, **total), {}
