// The address of what is shown: `#/PAGE?name=value`. A link to it opens the same view.
import { signal } from "./html.js";

function read() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: path || "chat", params: Object.fromEntries(new URLSearchParams(query)) };
}

/** The current `{page, params}`. */
export const route = signal(read());

addEventListener("hashchange", () => {
  route.value = read();
});

/** Return the address of a page; parameters that are empty are left out. */
export function hrefOf(page, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== "" && value != null);
  const query = new URLSearchParams(given).toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}

/** Show a page. With `replace` the Back button skips the current address. */
export function navigate(page, params = {}, { replace = false } = {}) {
  const href = hrefOf(page, params);
  if (replace) {
    history.replaceState(null, "", href);
    route.value = read();
  } else location.hash = href;
}
