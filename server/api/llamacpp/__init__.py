"""The HTTP API of llama.cpp's server, where OpenAI's API has no counterpart."""
