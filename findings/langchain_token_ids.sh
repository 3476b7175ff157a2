#!/usr/bin/env bash
# LangChain's OpenAIEmbeddings sends token ids of cl100k to any server, not the texts.
#
# Surprising: the name of the model does not matter. For a name that tiktoken does not know, the ids
# are those of OpenAI's cl100k, and the texts are not sent. With check_embedding_ctx_length=False the
# texts are sent. tiktoken downloads cl100k at the first call; here llama-index-core carries it.
# Versions: langchain-openai 1.7.4, tiktoken 0.14.0, llama-index-core 0.14.25 (only its files).
# Why it matters: a server that uses the ids as they are gives vectors of other words. If all ids are
# within its vocabulary, nothing fails: searches find the wrong texts.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet langchain-openai==1.7.4 tiktoken==0.14.0
"$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/files" llama-index-core==0.14.25

cat >"$folder/ids.py" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version

from langchain_openai import OpenAIEmbeddings

inputs = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        inputs.append(body["input"])
        entry = {"object": "embedding", "index": 0, "embedding": [0.5, 0.5]}
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        answer = {"object": "list", "model": "m", "data": [entry], "usage": usage}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
print("langchain-openai", version("langchain-openai"))
for model in ("all-MiniLM-L6-v2", "Qwen3-Embedding-0.6B"):
    for fields in ({}, {"check_embedding_ctx_length": False}):
        client = OpenAIEmbeddings(model=model, base_url=url, api_key="none", **fields)
        client.embed_query("How do I bake bread?")
        print(model, fields or "by default", inputs[-1])
ids, text = [[4438, 656, 358, 23360, 16385, 30]], ["How do I bake bread?"]
assert inputs == [ids, text, ids, text]
server.shutdown()
PYTHON
cache=$folder/files/llama_index/core/_static/tiktoken_cache
TIKTOKEN_CACHE_DIR=$cache "$folder/venv/bin/python" "$folder/ids.py"
# Output:
#   langchain-openai 1.7.4
#   all-MiniLM-L6-v2 by default [[4438, 656, 358, 23360, 16385, 30]]
#   all-MiniLM-L6-v2 {'check_embedding_ctx_length': False} ['How do I bake bread?']
#   Qwen3-Embedding-0.6B by default [[4438, 656, 358, 23360, 16385, 30]]
#   Qwen3-Embedding-0.6B {'check_embedding_ctx_length': False} ['How do I bake bread?']
