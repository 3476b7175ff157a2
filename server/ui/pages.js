// The pages and drawers. Each is loaded when it is first shown.

/** `key` is the letter behind `g` that opens the page. */
export const pages = [
  { id: "chat", title: "Chat", key: "c", load: () => import("./chat/page.js") },
  { id: "engine", title: "Engine", key: "e", load: () => import("./watch/page.js") },
  { id: "lens", title: "Lens", key: "l", load: () => import("./lens/page.js") },
  { id: "prompt", title: "Prompt", key: "p", load: () => import("./prompt/page.js") },
  { id: "model", title: "Model", key: "m", load: () => import("./model/page.js") },
  { id: "compare", title: "Compare", key: "d", load: () => import("./compare/page.js") },
];

/** Drawers open over a page by the parameter `drawer`; they get `{params, close}`. */
export const drawers = {
  inspector: () => import("./explain/drawer.js"),
  waterfall: () => import("./requests/drawer.js"),
};
