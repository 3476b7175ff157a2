// Pictures of a message: `{name, url, width, height, reduced}` with `url` as data: and `reduced` the
// width and height that the file had if the page has made it smaller, else null.

import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { hello } from "./store.js";

const SPARE_BYTES = 64 * 1024; // of a body, for its other fields
const LEAST_BYTES = 16 * 1024; // of a picture's URL; one that is reduced further shows nothing
const SIDES = [3072, 2048, 1536, 1024, 768, 512, 384, 256]; // px of the longer side, tried in order
const QUALITY = 0.9; // of JPEG
const URL_FORM = /^data:(image\/(?:png|jpeg|webp|gif));base64,/;
const size = (bytes) => `${(bytes / 2 ** 20).toLocaleString("en", { maximumFractionDigits: 1 })} MiB`;

export const takesImages = () => Boolean(hello.value?.takes_images);

/** The media type of a picture; null for another file. Throws an Error if it cannot be sent. */
export async function pictureType(file) {
  const type = await typeByBytes(file);
  if (type && !takesImages()) throw new Error(`This model takes no pictures, so ${file.name} is not sent.`);
  // The drawing of an SVG is a text.
  if (!type && file.type.startsWith("image/") && file.type !== "image/svg+xml") throw otherForm(file);
  return type;
}

/** The error of a file that is no picture. */
export const otherForm = ({ name }) => new Error(`${name} is no PNG, JPEG, WebP or GIF picture.`);

async function typeByBytes(file) {
  const bytes = new Uint8Array(await file.slice(0, 12).arrayBuffer());
  const text = String.fromCharCode(...bytes);
  if (text.startsWith("\x89PNG\r\n\x1a\n")) return "image/png";
  if (text.startsWith("\xff\xd8\xff")) return "image/jpeg";
  if (/^GIF8[79]a/.test(text)) return "image/gif";
  return /^RIFF[^]{4}WEBP/.test(text) ? "image/webp" : null;
}

/** The bytes that pictures may add to the body of a request that has `messages`. */
export function roomBehind(messages) {
  const used = new Blob([JSON.stringify(messages)]).size;
  return hello.value.max_body_bytes - SPARE_BYTES - used;
}

/**
 * Read a file of this media type as a picture whose URL has `room` bytes at most. One that is larger
 * is reduced. Throws an Error that says why it cannot be sent.
 */
export async function pictureOf(file, type, room) {
  let image;
  try {
    image = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} cannot be read as a picture.`);
  }
  const { width, height } = image;
  const picture = { name: file.name, width, height, reduced: null };
  if (Math.ceil(file.size / 3) * 4 + 40 <= room) {
    return { ...picture, url: await urlOf(new Blob([file], { type })) };
  }
  for (const side of SIDES) {
    const scale = Math.min(1, side / Math.max(width, height));
    const smaller = await drawn(image, Math.max(1, width * scale), Math.max(1, height * scale));
    if (room >= LEAST_BYTES && smaller.url.length <= room) {
      return { ...picture, ...smaller, reduced: { width, height } };
    }
  }
  throw new Error(`There is no room for ${file.name}: requests of this chat send all its pictures `
    + `again, and the server takes ${size(hello.value.max_body_bytes)} (--max-body-bytes).`);
}

/** A picture drawn in this size on white, which the server also puts below transparent parts. */
async function drawn(image, width, height) {
  const canvas = new OffscreenCanvas(Math.round(width), Math.round(height));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
  return { width: canvas.width, height: canvas.height, url: await urlOf(blob) };
}

function urlOf(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** What to tell about pictures that were reduced; "" if none was. */
export function reducedLine(pictures) {
  const lines = pictures.filter(({ reduced }) => reduced).map(({ name, reduced, width, height }) =>
    `${name} was reduced from ${reduced.width} × ${reduced.height} to ${width} × ${height} pixels.`);
  if (!lines.length) return "";
  const limit = size(hello.value.max_body_bytes);
  return [...lines, `The server takes requests of at most ${limit} (--max-body-bytes).`].join(" ");
}

/** The `content` of a message: its text, or a list of parts if it has pictures. */
export function withPictures(text, pictures = []) {
  if (!pictures.length) return text;
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

/** Whether a value, perhaps of an imported file, is a picture that can be shown and sent. */
export function isPicture(value) {
  if (typeof value?.name !== "string" || typeof value.url !== "string") return false;
  try {
    return blobOf(value.url).size > 0;
  } catch {
    return false;
  }
}

/** The file of a data: URL. Throws an Error for another form. */
export function blobOf(url) {
  const [start, type] = URL_FORM.exec(url);
  const bytes = Uint8Array.from(atob(url.slice(start.length)), (one) => one.charCodeAt(0));
  return new Blob([bytes], { type });
}

/** An address of the picture that the page's policy lets it load, while the component is shown. */
function useAddress({ url }) {
  const address = useMemo(() => URL.createObjectURL(blobOf(url)), [url]);
  useEffect(() => () => URL.revokeObjectURL(address), [address]);
  return address;
}

/** The picture alone; `alt` is its name unless it is only an ornament. */
export function Picture({ picture, alt = picture.name }) {
  return html`<img src=${useAddress(picture)} alt=${alt} />`;
}

/** Pictures before they are sent, each with a button that removes it. */
export function Attached({ pictures, change }) {
  if (!pictures.length) return null;
  return html`<ul class="pictures" aria-label="Attached pictures">
    ${pictures.map((picture, index) => html`<li key=${index}>
      <${Picture} picture=${picture} />
      <small class="muted">${picture.width} × ${picture.height}${picture.reduced && ", reduced"}</small>
      <button type="button" aria-label=${`Remove ${picture.name}`}
        onClick=${() => change(pictures.filter((one) => one !== picture))}>×</button></li>`)}
  </ul>`;
}

/** Pictures of a message. A click shows one in full width. */
export function Shown({ pictures }) {
  const [large, setLarge] = useState(null);
  if (!pictures.length) return null;
  return html`<ul class="pictures pictures-sent" aria-label="Pictures">
    ${pictures.map((picture, index) => html`<li key=${index}>
      <button type="button" aria-label=${`${picture.name}, full width`} aria-pressed=${large === picture}
        title=${`${picture.name}, ${picture.width} × ${picture.height}`}
        onClick=${() => setLarge(large === picture ? null : picture)}>
        <${Picture} picture=${picture} /></button></li>`)}
  </ul>`;
}

/** The pictures that the clipboard holds instead of a text. */
export function pastedFiles({ clipboardData }) {
  if (!clipboardData || clipboardData.getData("text/plain")) return [];
  return [...clipboardData.files];
}

/** A button that picks files; `accept` is that of its field. */
export function FileButton({ attach, name, title, label, accept, children }) {
  const field = useRef(null);
  const take = async () => {
    await attach([...field.current.files]);
    field.current.value = ""; // so that the same file can be picked again
  };
  return html`
    <button type="button" title=${title} aria-label=${label} onClick=${() => field.current.click()}>
      ${children}</button>
    <input type="file" multiple hidden ref=${field} aria-label=${name} accept=${accept}
      onChange=${take} />`;
}

/** A button that picks pictures. */
export function PictureButton({ attach }) {
  return html`<${FileButton} attach=${attach} name="Pictures" title="Attach pictures"
    label="Attach pictures" accept="image/png,image/jpeg,image/webp,image/gif">
    <svg class="picture-icon" viewBox="0 0 20 20" aria-hidden="true">
      <rect x="2" y="3.5" width="16" height="13" rx="2" /><circle cx="7" cy="8" r="1.5" />
      <path d="M2.5 14.5 8 10.5l3.5 3 2.5-2 4 3" />
    </svg></${FileButton}>`;
}
