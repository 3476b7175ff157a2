// Tokens and figures as text, as all pages write them.

/** A token with its white space visible; "∅" for one without text. */
export function visible(text) {
  if (text === "") return "∅";
  return text
    .replaceAll(" ", "·").replaceAll("\t", "⇥").replaceAll("\r", "␍").replaceAll("\n", "⏎");
}

/** A probability with three digits: "91.2 %" or "0.05 %". */
export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 2 : 1)} %`;

/** A number with a fixed count of decimals, a true minus sign and no minus before zero. */
export function number(value, decimals) {
  const text = value.toFixed(decimals);
  if (Number(text) === 0) return text.replace("-", "");
  return text.replace("-", "\u2212");
}

/** A time in ms as text: "9.10 ms", "410 ms" or "2.31 s". */
export function duration(ms) {
  const size = Math.abs(ms);
  if (size < 0.005) return "0 ms";
  if (size >= 1000) return `${number(ms / 1000, 2)} s`;
  if (size >= 100) return `${number(ms, 0)} ms`;
  return `${number(ms, size >= 10 ? 1 : 2)} ms`;
}
