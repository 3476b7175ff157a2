"""Route requests of Ray Serve with a policy of `deploy.ray.policies`."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.ray.policies import POLICIES, Policy

PREFIX = "prefix"  # keyword argument of a call with the hashes of its prompt


class PolicyRouter(RequestRouter):
    """Ranks replicas by `policy`, a name in POLICIES. Ray uses the first one with room."""

    def initialize_state(self, *, policy: str) -> None:
        self._policy: Policy[ReplicaID] = POLICIES[policy]()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        known = self.replica_queue_len_cache
        loads = {replica_id: known.get(replica_id) or 0 for replica_id in replicas}
        prefix: list[bytes] = []
        if pending_request is not None:
            prefix = pending_request.kwargs.get(PREFIX, [])
            # All replicas are ranked, so a retry has no other candidates. Wait before it.
            pending_request.routing_context.should_backoff = True
        return [[replicas[replica_id]] for replica_id in self._policy.rank(prefix, loads)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._policy.record(pending_request.kwargs.get(PREFIX, []), replica_id)
