"""The API of text-embeddings-inference, besides its /rerank."""
