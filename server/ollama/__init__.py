"""Ollama's API and System One, which Ollama's clients call on the same port."""
