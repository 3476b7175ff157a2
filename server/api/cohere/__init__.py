"""Cohere's API of embeddings and of rerankers."""
