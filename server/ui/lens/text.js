// Figures and tokens of the lens as text.

import { visible } from "../text.js";

/** A visible token of at most `most` characters. */
export function short(text, most = 12) {
  const shown = [...visible(text)];
  return shown.length > most ? `${shown.slice(0, most - 1).join("")}…` : shown.join("");
}

/** A figure with four significant digits. */
export function figure(value) {
  if (value === null || Number.isNaN(value)) return "–";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(1).replace("-", "−");
  return Number(value.toPrecision(4)).toString().replace("-", "−");
}

/** An exact figure for tables: six digits after the point. */
export const exact = (value) => (value === null ? "–" : value.toFixed(6).replace("-", "−"));

/** The visible text of each token of a report. */
export function piecesOf(report, ids) {
  return ids.map((id) => report.pieces[id] ?? `#${id}`);
}
