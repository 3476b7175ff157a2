// What the runners of the Node clients share: the servers to call, and the report of cells.
//
// The argument of a runner is the JSON of the servers (Target in python/cells.py). A runner prints
// one line of JSON per cell: {"cell", "passed", "reason"}. `passed` is null if the client has no
// such feature.

import assert from "node:assert";

const ABORT_MS = 10_000;

export const target = JSON.parse(process.argv[2]);
export const question = "What is the capital of France?";
export const weather = "What is the weather in Paris?";
export const tooHot = 3; // a temperature above the limit of 2
export const citySchema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};

export function killEngine() {
  process.kill(target.engine_pid, "SIGKILL");
}

async function aborts() {
  const response = await fetch(`${target.endless_url}/metrics`);
  const found = /^penstock:aborts_total\{.*reason="disconnect".*\} (\S+)$/m.exec(
    await response.text(),
  );
  return found ? Number(found[1]) : 0;
}

// Wait until the server has aborted the one request that its client left.
export async function checkAborted() {
  const deadline = Date.now() + ABORT_MS;
  while (Date.now() < deadline) {
    if ((await aborts()) === 1) return;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  assert.fail(`the server did not abort the request within ${ABORT_MS} ms`);
}

// Check the call of the weather tool.
export function checkCall(name, input) {
  const values = typeof input === "string" ? JSON.parse(input) : input;
  assert.equal(name, "get_weather");
  assert.deepEqual(Object.keys(values), ["city"]);
  assert.equal(typeof values.city, "string");
}

// Check the pieces of a streamed answer to the question.
export function checkPieces(pieces) {
  assert(pieces.length > 1, JSON.stringify(pieces));
  assert(pieces.join("").includes("Paris"), pieces.join(""));
}

// Return what the call throws.
export async function thrown(call) {
  let result;
  try {
    result = await call();
  } catch (error) {
    return error;
  }
  return assert.fail(`nothing was thrown; the result is ${JSON.stringify(result)}`);
}

// Run the cells in order and print a line for each. A text is why there is no such cell.
export async function run(cells) {
  for (const [cell, check] of Object.entries(cells)) {
    let passed = true;
    let reason = "";
    if (typeof check === "string") {
      passed = null;
      reason = check;
    } else {
      try {
        await check();
      } catch (error) {
        passed = false;
        reason = String(error);
        console.error(error);
      }
    }
    console.log(JSON.stringify({ cell, passed, reason }));
  }
  process.exit(0);
}
