#!/usr/bin/env bash
# @continuedev/cli 1.5.47 sends the id of the machine to api.continue.dev whenever it starts.
#
# - The request is GET https://api.continue.dev/cn/info?id=…, where the id is the hash of
#   node-machine-id. It is sent as the module is loaded, with a model and an address of one's own.
# - CONTINUE_METRICS_ENABLED=0, CONTINUE_CLI_ENABLE_TELEMETRY=0 and CONTINUE_API_BASE do not prevent
#   it, and HTTPS_PROXY is not used for it.
#
# It matters to users of local models: no setting keeps the request from being sent.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"private": true}' > package.json
npm install --silent --no-audit --no-fund node@22.23.3 @continuedev/cli@1.5.47

cat > config.yaml <<'YAML'
name: local
version: 1.0.0
schema: v1
models: [{name: m, provider: openai, model: m, apiBase: "http://127.0.0.1:9/v1", apiKey: none}]
YAML
cat > hook.cjs <<'JAVASCRIPT'
const { appendFileSync } = require("node:fs");
globalThis.fetch = async (resource) => {
  const url = String(resource.url ?? resource);
  if (url.startsWith("http")) appendFileSync("requests.txt", `${url}\n`);
  throw new Error("refused");
};
JAVASCRIPT

export PATH="$folder/node_modules/.bin:$PATH" HOME="$folder" CONTINUE_GLOBAL_DIR="$folder/own"
export CONTINUE_METRICS_ENABLED=0 CONTINUE_CLI_ENABLE_TELEMETRY=0
export CONTINUE_API_BASE=http://127.0.0.1:9 HTTPS_PROXY=http://127.0.0.1:9
export NODE_OPTIONS="--require $folder/hook.cjs"
cn --version
timeout 60 cn --config config.yaml --auto -p hello > output.txt 2>&1 < /dev/null || true
sed 's/id=[0-9a-f]*/id=HASH/' requests.txt
grep -qE '^https://api\.continue\.dev/cn/info\?id=[0-9a-f]{64}$' requests.txt
