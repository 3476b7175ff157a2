// The connection to /ui/api/watch: reconnects, pauses at a snapshot, and takes one after `lost`.
import { signal } from "../html.js";
import { events, get } from "../api.js";
import { EngineState } from "./state.js";

const RETRY_MS = 2000;
const MOST_HELD = 1200; // frames kept during a pause: two minutes
const SETTLE_MS = 3000;
const CHECK_MS = 2000; // least time between two snapshots because of a difference

/** One viewer. `state` is null until the first event; `version` changes with it. */
export class Watch {
  constructor() {
    this.state = null;
    this.version = signal(0);
    this.mode = signal("live"); // live, pausing, paused
    this.problem = signal("");
    this.checked = signal(""); // what the comparison with the engine's tables at a pause found
    this.held = []; // frames that are not applied yet
    this.isResyncing = false;
    this.needsSnapshot = false;
    this.lastCheck = 0;
    this.stop = null;
  }

  /** Watch until `end`, except while the window is hidden. */
  begin() {
    this.isOpen = true;
    this.onVisibility = () => (document.hidden ? this.stop?.abort() : this.connect());
    document.addEventListener("visibilitychange", this.onVisibility);
    this.connect();
  }

  end() {
    this.isOpen = false;
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.stop?.abort();
  }

  async connect() {
    if (!this.isOpen || document.hidden || (this.stop && !this.stop.signal.aborted)) return;
    clearTimeout(this.timer);
    const stop = new AbortController();
    this.stop = stop;
    try {
      const { signal: stopped } = stop;
      await events("ui/api/watch?blocks=1", { signal: stopped }, (event) => this.onEvent(event));
      this.problem.value = "The server has ended the view.";
    } catch (error) {
      if (!stop.signal.aborted) this.problem.value = error.message;
    }
    if (this.stop !== stop) return;
    this.stop = null;
    if (this.isOpen && !document.hidden) this.timer = setTimeout(() => this.connect(), RETRY_MS);
  }

  onEvent({ event, data }) {
    const found = JSON.parse(data);
    if (event === "hello") this.onHello(found);
    else if (event === "frame") this.onFrame(found);
  }

  onHello(hello) {
    this.problem.value = "";
    const steps = this.state?.steps ?? [];
    const last = steps.at(-1);
    const isSameServer = !last || last.begin <= hello.t;
    const ended = this.state?.ended ?? [];
    this.state = new EngineState(hello);
    if (isSameServer) Object.assign(this.state, { steps, ended });
    this.held = [];
    this.isResyncing = this.needsSnapshot = false;
    this.mode.value = "live";
    this.changed();
  }

  changed() {
    this.version.value += 1;
  }

  onFrame(frame) {
    if (this.mode.value !== "live" || this.isResyncing) {
      this.held.push(frame);
      if (this.held.length > MOST_HELD) {
        this.held = [];
        this.needsSnapshot = true;
      }
      if (this.mode.value === "pausing") this.settle();
      return;
    }
    this.take(frame);
    this.changed();
  }

  take(frame) {
    if (frame.lost) {
      this.state.lose();
      this.resync();
      return;
    }
    this.state.apply(frame);
    if (!this.state.agrees && performance.now() - this.lastCheck > CHECK_MS) this.resync();
  }

  /** Take the engine's own tables instead of the rebuilt ones. */
  async resync() {
    if (this.isResyncing) return;
    this.isResyncing = true;
    this.lastCheck = performance.now();
    const state = this.state;
    try {
      const snapshot = await get("ui/api/blocks");
      if (this.state === state) state.reset(snapshot);
    } catch (error) {
      this.problem.value = error.message;
    }
    this.isResyncing = false;
    if (this.mode.value === "live") this.release();
  }

  /** Apply the frames that were held back. */
  release() {
    while (this.held.length && !this.isResyncing) this.take(this.held.shift());
    this.changed();
  }

  /** Stop at a snapshot: the view then equals the engine's tables, which is checked. */
  async pause() {
    if (this.mode.value !== "live" || !this.state) return;
    this.mode.value = "pausing";
    this.checked.value = "";
    this.snapshot = null;
    this.giveUpAt = performance.now() + SETTLE_MS;
    const state = this.state;
    try {
      const snapshot = await get("ui/api/blocks");
      if (this.state !== state || this.mode.value !== "pausing") return;
      this.snapshot = snapshot;
    } catch (error) {
      this.checked.value = `Not checked: ${error.message}`;
      this.mode.value = "paused";
    }
    this.settle();
  }

  /** Apply held frames up to the snapshot; the server ends a frame exactly there. */
  settle() {
    if (!this.snapshot || this.mode.value !== "pausing") return;
    while (this.held.length && !this.held[0].lost && this.held[0].seq <= this.snapshot.seq) {
      this.state.apply(this.held.shift());
    }
    const isThere = this.state.seq === this.snapshot.seq;
    if (!isThere && !this.held.length && performance.now() < this.giveUpAt) {
      setTimeout(() => this.settle(), 100);
      return;
    }
    const found = isThere ? this.state.difference(this.snapshot) : "the frame did not come";
    this.checked.value = found
      ? `Differs from the engine's tables: ${found}.`
      : "Checked: equal to the engine's own tables.";
    this.mode.value = "paused";
    this.changed();
  }

  resume() {
    if (this.mode.value !== "paused") return;
    this.mode.value = "live";
    this.checked.value = "";
    if (this.needsSnapshot) {
      this.needsSnapshot = false;
      this.state.lose();
      this.resync();
    } else this.release();
  }

  toggle() {
    if (this.mode.value === "live") this.pause();
    else this.resume();
  }
}
