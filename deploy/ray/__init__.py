"""Penstock on Ray Serve: one ingress in front of N replicas, each of them our app and its engine.

Needs the extra `[ray]`. `python -m deploy.ray` runs it on this machine; `app:build` is what a
RayService imports. See docs/scaling.md.
"""
