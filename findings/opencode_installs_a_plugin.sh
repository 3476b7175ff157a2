#!/usr/bin/env bash
# opencode 1.18.33 installs @opencode-ai/plugin from npm into each folder of its configuration.
#
# - It does so at the start, without a plugin in the configuration. "autoupdate": false,
#   OPENCODE_DISABLE_AUTOUPDATE, OPENCODE_DISABLE_MODELS_FETCH and OPENCODE_DISABLE_DEFAULT_PLUGINS
#   do not prevent it.
# - It does not if the folder has node_modules and a package-lock.json that lists the package.
#
# It matters where no other host may be contacted, and where npm is out of reach.
set -euo pipefail

folder=$(mktemp -d)
trap 'kill "$proxy" 2>/dev/null; rm -rf "$folder"' EXIT
cd "$folder"
echo '{"private": true}' > package.json
npm install --silent --no-audit --no-fund opencode-ai@1.18.33

cat > proxy.py <<'PYTHON'
import socketserver


class Refuse(socketserver.StreamRequestHandler):
    def handle(self):
        print(self.rfile.readline().decode().split(" ")[1], flush=True)
        self.wfile.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")


with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refuse) as server:
    print(server.server_address[1], flush=True)
    server.serve_forever()
PYTHON
python3 proxy.py > hosts.txt &
proxy=$!
until [ -s hosts.txt ]; do sleep 0.1; done
port=$(head -1 hosts.txt)

run() {  # with the folder of the configuration
    mkdir -p project
    (cd project && env HOME="$folder" XDG_CONFIG_HOME="$1" XDG_DATA_HOME="$folder/data" \
        XDG_STATE_HOME="$folder/state" XDG_CACHE_HOME="$folder/cache" \
        HTTPS_PROXY="http://127.0.0.1:$port" NO_PROXY=127.0.0.1 OPENCODE_DISABLE_AUTOUPDATE=1 \
        OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_DEFAULT_PLUGINS=1 \
        OPENCODE_CONFIG_CONTENT='{"autoupdate": false, "model": "own/m", "provider": {"own": {
            "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "http://127.0.0.1:9/v1"},
            "models": {"m": {}}}}}' \
        timeout 25 "$folder/node_modules/.bin/opencode" run hello > "$folder/output.txt" 2>&1) || true
}

run "$folder/plain"
echo "without a lock file: $(tail -n +2 hosts.txt | sort -u | tr '\n' ' ')"
tail -n +2 hosts.txt | grep -q '^registry.npmjs.org:443$'
before=$(wc -l < hosts.txt)

mkdir -p locked/opencode/node_modules
echo '{"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}' \
    > locked/opencode/package-lock.json
run "$folder/locked"
echo "with a lock file: $(tail -n +$((before + 1)) hosts.txt | sort -u | tr '\n' ' ')"
[ "$(wc -l < hosts.txt)" = "$before" ]
