#!/usr/bin/env bash
# langchain-cohere's CohereRerank sends a document {"text": ...} as YAML, with the name of its field.
#
# Surprising: the score is that of the text "text: flour\n". A string or a Document of LangChain is
# sent as it is, so the same document has two scores. Cohere's own client sends the object.
# The package needs cohere below 6, and its CohereEmbeddings call Cohere's first API (/v1/embed).
# Versions: langchain-cohere 0.6.0, cohere 5.21.1.
# Why it matters: scores differ from those of the same documents over HTTP, and no server can know.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet langchain-cohere==0.6.0 cohere==5.21.1

cat >"$folder/documents.py" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version

import cohere
from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_core.documents import Document

received = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        received.append((self.path, body.get("documents")))
        answer = {"id": "x", "results": [{"index": 0, "relevance_score": 0.5}]}
        if "embed" in self.path:
            embeddings = {"response_type": "embeddings_by_type", "embeddings": {"float": [[1.0]]}}
            answer = {"id": "x", "texts": body["texts"]} | embeddings
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
url = f"http://127.0.0.1:{server.server_port}"
print("langchain-cohere", version("langchain-cohere"), "cohere", version("cohere"))
ranker = CohereRerank(model="m", base_url=url, cohere_api_key="none")
ranker.rerank([{"text": "flour"}], "bread")
ranker.rerank(["flour"], "bread")
ranker.rerank([Document("flour")], "bread")
own = cohere.ClientV2(base_url=url, api_key="none")
own.rerank(model="m", query="bread", documents=[{"text": "flour"}])
CohereEmbeddings(model="m", base_url=url, cohere_api_key="none").embed_query("bread")
for path, documents in received:
    print(path, documents)
assert received == [
    ("/v2/rerank", ["text: flour\n"]),
    ("/v2/rerank", ["flour"]),
    ("/v2/rerank", ["flour"]),
    ("/v2/rerank", [{"text": "flour"}]),
    ("/v1/embed", None),
]
server.shutdown()
PYTHON
"$folder/venv/bin/python" "$folder/documents.py"
# Output:
#   langchain-cohere 0.6.0 cohere 5.21.1
#   /v2/rerank ['text: flour\n']
#   /v2/rerank ['flour']
#   /v2/rerank ['flour']
#   /v2/rerank [{'text': 'flour'}]
#   /v1/embed None
