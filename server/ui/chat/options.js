// The options that were last used with a model, kept in this browser for the next chat.

import { hello } from "../store.js";

const nameOf = () => `penstock.options.${hello.value?.model.id}`;

/** The options of the served model; {} if none are kept. */
export function keptOptions() {
  try {
    const found = JSON.parse(localStorage.getItem(nameOf()) ?? "{}");
    return typeof found === "object" && found !== null && !Array.isArray(found) ? found : {};
  } catch {
    return {}; // damaged, or the browser keeps nothing
  }
}

export function keepOptions(options) {
  const isEmpty = Object.values(options).every((value) => !value || !Object.keys(value).length);
  try {
    if (isEmpty) localStorage.removeItem(nameOf());
    else localStorage.setItem(nameOf(), JSON.stringify(options));
  } catch {
    // the browser keeps nothing
  }
}
