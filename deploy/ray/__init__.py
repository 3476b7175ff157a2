"""Penstock on Ray Serve: one ingress in front of N replicas, each with an app and an engine.

Needs the extra `[ray]`. `python -m deploy.ray` runs it on this machine; a RayService imports
`app:build`. See docs/scaling.md.
"""
