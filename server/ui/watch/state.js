// The engine's requests, KV blocks and steps, rebuilt from the events of /ui/api/watch.

export const MOST_STEPS = 4096;
const MOST_ENDED = 12;
const NAMES = ["id", "state", "prompt", "cached", "out", "priority", "arrived", "name"];

/** Times are microseconds since the server's epoch. */
export class EngineState {
  constructor(hello) {
    this.facts = hello;
    this.role = hello.role;
    this.steps = []; // {n, begin, dur, chunks, decodes, preempted, others}, the oldest first
    this.lenses = []; // {begin, dur} of the pieces of lenses, which run between steps
    this.decoding = new Set();
    this.ended = []; // requests, the last one first
    this.rates = []; // [time, generated tokens], of the last seconds
    this.reset(hello);
  }

  /** Take the blocks and requests of a snapshot; the steps stay. */
  reset(snapshot) {
    this.seq = snapshot.seq;
    this.now = snapshot.t;
    this.stats = snapshot.stats;
    this.queue = snapshot.queue;
    this.findable = new Set(snapshot.findable);
    this.owners = new Map(); // block -> ids of the requests that hold it
    this.requests = new Map();
    for (const entry of snapshot.requests) {
      const request = { ...entry, tables: entry.tables.map(() => []) };
      this.requests.set(request.id, request);
      entry.tables.forEach((table, group) => this.take(request, group, 0, table));
    }
  }

  /** A reader that missed frames gets all decodes of the next step anew. */
  lose() {
    this.decoding = new Set();
  }

  /** Apply a frame. A decode adds one token; a row has the sum where it adds more. Events before the last snapshot are left out, their steps are not. */
  apply(frame) {
    this.now = frame.t;
    const isNew = frame.seq > this.seq;
    for (const step of frame.steps) this.addStep(step, isNew);
    for (const [begin, dur] of frame.lenses) this.lenses.push({ begin, dur });
    if (this.lenses.length > MOST_STEPS) this.lenses.splice(0, this.lenses.length - MOST_STEPS);
    if (!isNew) return;
    this.seq = frame.seq;
    this.stats = frame.stats;
    this.queue = frame.queue;
    for (const row of frame.requests) this.meet(row);
    for (const event of frame.kv) this.applyEvent(event);
    for (const row of frame.requests) this.update(row);
    this.rates.push([frame.t, frame.stats.generated]);
    while (this.rates.length > 2 && this.rates[1][0] < frame.t - 2e6) this.rates.shift();
  }

  addStep([n, begin, dur, chunks, joined, left, preempted, others], isNew) {
    for (const id of left) this.decoding.delete(id);
    for (const id of joined) this.decoding.add(id);
    const decodes = [...this.decoding];
    this.steps.push({ n, begin, dur, chunks, decodes, preempted, others });
    if (this.steps.length > MOST_STEPS + 256) this.steps.splice(0, this.steps.length - MOST_STEPS);
    for (const id of isNew ? decodes : []) {
      const request = this.requests.get(id);
      if (request) request.out += 1;
    }
  }

  /** Make requests known, before the events that name them. */
  meet(row) {
    if (this.requests.has(row[0])) return;
    const request = Object.fromEntries(NAMES.map((name, place) => [name, row[place]]));
    this.requests.set(request.id, { ...request, tables: [] });
  }

  /** Set what a row says: it is later than the steps and events of its frame. */
  update(row) {
    const request = this.requests.get(row[0]);
    const isEnded = !request;
    const target = request ?? this.ended.find(({ id }) => id === row[0]);
    if (target) NAMES.forEach((name, place) => { target[name] = row[place]; });
    if (isEnded && target) target.endedAt = this.now;
  }

  applyEvent([kind, ...rest]) {
    if (kind === "find") for (const block of rest[0]) this.findable.add(block);
    else if (kind === "forget") for (const block of rest[0]) this.findable.delete(block);
    else {
      const request = this.requests.get(rest[0]);
      if (!request) return;
      if (kind === "take") this.take(request, ...rest.slice(1));
      else if (kind === "pass") this.pass(request, ...rest.slice(1));
      else this.close(request, kind);
    }
  }

  take(request, group, first, blocks) {
    while (request.tables.length <= group) request.tables.push([]);
    blocks.forEach((block, place) => {
      request.tables[group][first + place] = block;
      if (!block) return;
      if (!this.owners.has(block)) this.owners.set(block, []);
      this.owners.get(block).push(request.id);
    });
  }

  pass(request, group, first, count) {
    const table = request.tables[group];
    for (let place = first; place < first + count; place += 1) {
      this.drop(table[place], request.id);
      table[place] = 0;
    }
  }

  close(request, kind) {
    for (const table of request.tables) for (const block of table) this.drop(block, request.id);
    request.tables = [];
    if (kind !== "end") return;
    this.requests.delete(request.id);
    this.ended.unshift(request);
    this.ended.length = Math.min(this.ended.length, MOST_ENDED);
  }

  drop(block, id) {
    const owners = this.owners.get(block);
    if (!owners) return;
    owners.splice(owners.indexOf(id), 1);
    if (!owners.length) this.owners.delete(block);
  }

  /** What a block is: {block, owners, isFound, kind} with kind held, shared, cached or free. */
  blockOf(block) {
    const owners = this.owners.get(block) ?? [];
    const isFound = this.findable.has(block);
    let kind = isFound ? "cached" : "free";
    if (owners.length) kind = owners.length > 1 ? "shared" : "held";
    return { block, owners: [...owners].sort((a, b) => a - b), isFound, kind };
  }

  get numCached() {
    let count = 0;
    for (const block of this.findable) if (!this.owners.has(block)) count += 1;
    return count;
  }

  /** Whether the rebuilt map has as many blocks of each kind as the engine says. */
  get agrees() {
    if (this.role !== "admin") return true;
    return this.owners.size === this.stats.held && this.numCached === this.stats.cached;
  }

  /** Generated tokens per second, over the last two seconds. */
  get rate() {
    if (this.rates.length < 2 || !(this.stats.running + this.stats.waiting)) return 0;
    const [begin, before] = this.rates[0];
    const [end, after] = this.rates.at(-1);
    return end > begin ? Math.max(0, (1e6 * (after - before)) / (end - begin)) : 0;
  }

  /** What differs from a snapshot of the engine's own tables, as text; "" if nothing does. */
  difference(snapshot) {
    const here = JSON.stringify(this.document());
    const there = new EngineState({ ...snapshot, role: this.role });
    if (here === JSON.stringify(there.document())) return "";
    const lost = [...there.requests.keys()].filter((id) => !this.requests.has(id));
    const extra = [...this.requests.keys()].filter((id) => !there.requests.has(id));
    const texts = [];
    if (lost.length) texts.push(`missing requests: ${lost.join(", ")}`);
    if (extra.length) texts.push(`unknown: ${extra.join(", ")}`);
    for (const [id, request] of this.requests) {
      const other = there.requests.get(id);
      for (const name of other ? ["state", "out"] : []) {
        if (request[name] !== other[name]) {
          texts.push(`#${id} ${name} ${request[name]} (engine: ${other[name]})`);
        }
      }
    }
    return texts.join("; ") || "blocks";
  }

  /** The blocks in a form that can be compared. */
  document() {
    const requests = [...this.requests.values()].sort((a, b) => a.id - b.id);
    return {
      requests: requests.map(({ id, state, out, tables }) => {
        const filled = tables.map((table) => [...table]);
        while (filled.length && !filled.at(-1).length) filled.pop();
        return [id, state, out, filled];
      }),
      findable: this.role === "admin" ? [...this.findable].sort((a, b) => a - b) : [],
    };
  }
}

const WHY = {
  rows: "the batch is full",
  budget: "the step's token budget is used",
  preemption: "a request was preempted in this step",
  adapter: "its adapter is not in memory",
};

/** Why a request of the queue waits. `place` counts from the first of the queue. */
export function reasonOf(queue, place, facts) {
  if (queue.reason === "rows") return `${WHY.rows} (${facts.max_num_seqs} requests run)`;
  if (queue.reason in WHY) return WHY[queue.reason];
  if (place > 0) return queue.first === null ? "behind another request" : `behind #${queue.first}`;
  if (queue.reason === "blocks") {
    return `no blocks (needs ${queue.needed}, ${queue.available} available)`;
  }
  if (queue.reason === "prefix") {
    const other = queue.sharing === null ? "another request" : `#${queue.sharing}`;
    return `waits to reuse blocks that ${other} computes`;
  }
  return "other texts use the encoder's budget";
}
