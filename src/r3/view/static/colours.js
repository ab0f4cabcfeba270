// Colours that colour-blind people can tell apart: Okabe and Ito's for kinds, cividis for amounts.

export const KINDS = ["--blue", "--orange", "--green", "--vermillion", "--purple", "--sky", "--grey"];

const resolved = new Map();

// A custom property as a colour that a canvas takes; light-dark() is only resolved on a real property. Cached, since
// each lookup makes the browser lay out the page.
export function colour(name) {
  const key = `${name} ${isDark()}`;
  if (!resolved.has(key)) resolved.set(key, computed(name));
  return resolved.get(key);
}

function computed(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

export const isDark = () => {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

// cividis (Nuñez, Anderton and Renslow 2018) at eight places; between them, straight lines.
const CIVIDIS = [
  [0, 32, 77],
  [31, 54, 109],
  [75, 84, 108],
  [107, 110, 114],
  [138, 135, 121],
  [172, 162, 112],
  [209, 192, 90],
  [255, 234, 70],
];
const LOW = [0, 114, 178];
const HIGH = [213, 94, 0];

function between(stops, share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  return stops[i].map((value, k) => Math.round(value + (stops[i + 1][k] - value) * (at - i)));
}

// A colour for an amount from 0 to 1: none at 0, then towards the end of cividis that contrasts with the page.
export function amount(share) {
  const dark = isDark();
  const rgb = between(CIVIDIS, dark ? share : 1 - share);
  return painted(rgb, Math.min(1, 0.06 + 0.94 * share), dark);
}

// A background colour laid over the page, and black or white letters, whichever contrast more.
function painted(rgb, strength, dark) {
  const page = dark ? [27, 31, 38] : [255, 255, 255];
  const [r, g, b] = rgb.map((value, i) => strength * value + (1 - strength) * page[i]);
  const bright = (0.299 * r + 0.587 * g + 0.114 * b) / 255;
  return { background: `rgb(${rgb.join(" ")} / ${strength.toFixed(2)})`, color: bright > 0.52 ? "#10141a" : "#fff" };
}

// A colour for a value from −1 to 1: blue below 0, orange above, none at 0.
export function departure(share) {
  const strength = Math.min(1, Math.abs(share));
  return painted(share < 0 ? LOW : HIGH, strength, isDark());
}

const wide = () => [0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1];
export const amountKey = () =>
  `linear-gradient(90deg, ${wide()
    .map((x) => amount(x).background)
    .join(", ")})`;
export const departureKey = () =>
  `linear-gradient(90deg, ${wide()
    .map((x) => departure(2 * x - 1).background)
    .join(", ")})`;
