"""Cohere's API of embeddings."""
