"""The KV of blocks in files, so that a restart does not lose it: --kv-cache-dir."""
