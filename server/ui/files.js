// Offer a file that the page has made. A link to the server could not send the key.

/** Save `blob` under this name. */
export function saveAs(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Save a text of JSON under this name. */
export function saveJson(text, name) {
  saveAs(new Blob([text], { type: "application/json" }), name);
}
