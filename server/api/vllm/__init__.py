"""Endpoints of vLLM that OpenAI's API does not have."""
