// Numbers of the waterfall as text.

import { duration, number } from "../text.js";

/** The parts of a request's time, in the order in which they are shown, with what they mean. */
export const PARTS = [
  ["server", "in the server's own process: reading images, tokenising, waiting to send, detokenising"],
  ["queue", "in the engine, while no step computed anything of this request"],
  ["encoder", "the image encoder worked on its images"],
  ["base", "a step's constant cost, such as reading the weights: nobody's fault"],
  ["own", "this request's own tokens"],
  ["others", "tokens of other requests in the same steps"],
  ["waiting", "threads of the engine waited for a core that other programs had"],
  ["unexplained", "what the steps took beyond the step model"],
];

/** The parts of a request: the encoder is one only of those with images. */
export function partsOf(report) {
  const hasImages = report.choices.some(({ images }) => images);
  return PARTS.filter(([name]) => name !== "encoder" || hasImages);
}

/** What was done for the images of a choice: "1 image, encoded in 340 ms (12 units); ready …". */
export function imagesLine({ encoded, reused, units, encode_ms: ms, wait_ms: waited }) {
  const parts = [count(encoded + reused, "image")];
  if (encoded) {
    const which = reused ? `${encoded} encoded` : "encoded";
    parts.push(`${which} in ${duration(ms)} (${count(units, "unit")})`);
  }
  if (reused) parts.push(`${encoded ? `${reused} ` : ""}found encoded in the cache`);
  return `${parts.join(", ")}; ready ${duration(ms + waited)} after the submission.`;
}

/** The name of a part as it is shown. */
export const nameOf = (part) => (part === "waiting" ? "waiting for a core" : part);

/** A fit that explains less of the variance, or has fewer steps, makes the split rough. */
const ROUGH_R2 = 0.8;
const ROUGH_STEPS = 20;

export function isRough(fit) {
  return fit.r2 === null || fit.r2 < ROUGH_R2 || fit.steps < ROUGH_STEPS;
}

export function count(amount, noun) {
  return `${amount.toLocaleString("en")} ${noun}${amount === 1 ? "" : "s"}`;
}

export function shareOf(part, whole) {
  return whole > 0 ? `${number((100 * part) / whole, 0)} %` : "";
}

/** "2.31 s = server 9.10 ms + queue 410 ms + …", as the parts sum to the wall time. */
export function sumLine(report) {
  const parts = partsOf(report).map(([name]) => `${nameOf(name)} ${duration(report.parts[name])}`);
  return `${duration(report.wall_ms)} = ${parts.join(" + ")}`;
}

/** How another request is named: by its own id where that is known. */
export function neighbourName(id, requestId) {
  if (id === null) return "others";
  return requestId ? `#${id} ${requestId}` : `#${id}`;
}

/** What a step was spent on: "step 8812: 31.4 ms = base 9.1 ms + own 0.4 ms + #41 chunk 224: …". */
export function stepLine(step) {
  const shown = step.who.map(([id, ms, prefill]) => {
    return `#${id} ${prefill ? `chunk ${prefill}` : "decode"}: ${duration(ms)}`;
  });
  const [requests, ms, prefill, decodes] = step.more;
  if (requests) {
    const what = [prefill ? `chunks of ${prefill}` : "", decodes ? count(decodes, "decode") : ""];
    shown.push(`${what.filter(Boolean).join(", ")} of others: ${duration(ms)}`);
  }
  const title = `step ${step.n}: ${duration(step.ms)}`;
  if (step.queue) return `${title} of waiting, while it computed ${shown.join(" + ") || "nothing"}`;
  const own = step.prefill ? `own chunk ${step.prefill}` : `own ${count(step.decode, "decode")}`;
  const parts = [`base ${duration(step.base)}`, `${own}: ${duration(step.own)}`, ...shown];
  if (step.waiting) parts.push(`waiting for a core ${duration(step.waiting)}`);
  return `${title} = ${[...parts, `unexplained ${duration(step.unexplained)}`].join(" + ")}`;
}
