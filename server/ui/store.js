// What all pages share: the server's facts, the key, the theme.
import { effect, signal } from "./html.js";

export const hello = signal(null); // the answer of /ui/api/hello; null until it came
export const problem = signal(""); // why it did not come
export const key = signal(sessionStorage.getItem("penstock.key") ?? "");
export const askForKey = signal(false);
export const theme = signal(localStorage.getItem("penstock.theme") ?? "auto"); // auto, dark, light

effect(() => {
  if (key.value) sessionStorage.setItem("penstock.key", key.value);
  else sessionStorage.removeItem("penstock.key");
});

effect(() => {
  localStorage.setItem("penstock.theme", theme.value);
  if (theme.value === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme.value;
});
