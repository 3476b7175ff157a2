// Cividis, a colour scale that looks the same with most kinds of colour blindness.

const STOPS = [
  [0x00, 0x20, 0x4d], [0x00, 0x33, 0x6f], [0x39, 0x48, 0x6b], [0x57, 0x5c, 0x6d],
  [0x70, 0x71, 0x73], [0x8a, 0x87, 0x79], [0xa6, 0x9d, 0x75], [0xc4, 0xb5, 0x6c],
  [0xe4, 0xcf, 0x5b], [0xff, 0xea, 0x46],
];

/** The colours of 256 shades, as [red, green, blue]. */
export const SHADES = Array.from({ length: 256 }, (_, shade) => {
  const place = (shade / 255) * (STOPS.length - 1);
  const low = Math.min(Math.floor(place), STOPS.length - 2);
  const next = STOPS[low + 1];
  return STOPS[low].map((from, part) => Math.round(from + (next[part] - from) * (place - low)));
});

/** The shade of a probability or weight: its square root, so that small ones stay visible. */
export function shadeOf(value) {
  return Math.round(255 * Math.sqrt(Math.min(Math.max(value, 0), 1)));
}

/** The style of a cell with this shade; its text is black or white, whichever can be read. */
export function cellStyle(shade) {
  const [red, green, blue] = SHADES[shade];
  const luminance = 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  return { background: `rgb(${red} ${green} ${blue})`, color: luminance > 0.179 ? "#000" : "#fff" };
}

/** The light of one part of an sRGB colour, from 0 to 1 (WCAG 2.2, relative luminance). */
function linear(part) {
  const share = part / 255;
  return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
}
