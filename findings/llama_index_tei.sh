#!/usr/bin/env bash
# llama-index's clients of text-embeddings-inference take an error for an answer.
#
# Surprising: neither looks at the status. After a 401 or a 413 the user sees `KeyError: 0` or an
# empty AssertionError, without the server's message. The reranker's truncate_text is never sent, and its
# auth_token is the whole header `Authorization`: the embedder's is sent behind "Bearer".
# Versions: llama-index-embeddings-text-embeddings-inference 0.6.0,
# llama-index-postprocessor-tei-rerank 0.6.0, llama-index-core 0.14.25.
# Why it matters: with a key, the same setting works in one client and is a 401 in the other. A
# server can help only in its log.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llama-index-core==0.14.25 \
  llama-index-embeddings-text-embeddings-inference==0.6.0 \
  llama-index-postprocessor-tei-rerank==0.6.0

cat >"$folder/tei.py" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

received = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        received.append((self.path, self.headers["authorization"], sorted(body)))
        content = json.dumps({"error": "the key is wrong", "error_type": "unauthorized"}).encode()
        self.send_response(401)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
fields = {"base_url": url, "auth_token": "sk-1", "truncate_text": True}
embedder = TextEmbeddingsInference(model_name="m", **fields)
ranker = TextEmbeddingInference(**fields)
nodes = [NodeWithScore(node=TextNode(text="flour"))]
errors = [
    raised(lambda: embedder.get_text_embedding("flour")),
    raised(lambda: ranker.postprocess_nodes(nodes, query_str="bread")),
]
for error, (path, token, names) in zip(errors, received, strict=True):
    print(path, "raises", error.strip())
    print(f"  authorization {token!r}, fields {names}")
assert errors[0] == "KeyError: 0"
assert errors[1] == "AssertionError: "
assert received == [
    ("/embed", "Bearer sk-1", ["inputs", "truncate"]),
    ("/rerank", "sk-1", ["query", "texts"]),
]
server.shutdown()
PYTHON
"$folder/venv/bin/python" "$folder/tei.py"
# Output:
#   /embed raises KeyError: 0
#     authorization 'Bearer sk-1', fields ['inputs', 'truncate']
#   /rerank raises AssertionError:
#     authorization 'sk-1', fields ['query', 'texts']
