// Elements made from data. Text from a run only ever becomes a text node: nothing here parses HTML.

const STEERING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

// Control characters and direction marks, made visible (the same as r3.view.show.visible).
export function visible(text) {
  return String(text).replace(STEERING, (c) => {
    const code = c.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

const SVG = new Set(["svg", "g", "path", "circle", "line", "rect", "text", "title", "polyline", "polygon"]);

// h("div.card", {onclick}, "text", [nodes]): an element with its children; null and false children are left out.
export function h(name, attributes, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = SVG.has(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(element.style, value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
}

export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

// Numbers for people: three digits, thousands separated, a dash for what is missing.
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return digitsOf(value, digits).replace("-", "−");
}

function digitsOf(value, digits) {
  const size = Math.abs(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-GB");
  if (size >= 1000) return Math.round(value).toLocaleString("en-GB");
  return size !== 0 && size < 0.001 ? value.toExponential(1) : value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : digits);
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
export const signed = (value) =>
  value === null || value === undefined
    ? "–"
    : Math.abs(value) < 0.005
      ? "0"
      : `${value > 0 ? "+" : "−"}${Math.abs(value).toFixed(2)}`;
export const plural = (count, one, many) => `${number(count)} ${count === 1 ? one : many || `${one}s`}`;

export function bytes(count) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (count >= 1000 && at < units.length - 1) {
    count /= 1000;
    at += 1;
  }
  return `${at ? count.toFixed(1) : count} ${units[at]}`;
}

export const button = (label, onclick, more = {}) => h("button", { type: "button", onclick, ...more }, label);

// A row of buttons of which one is pressed.
export function choice(label, options, chosen, pick) {
  return h(
    "div.choice",
    { role: "group", "aria-label": label },
    options.map(([value, text, title]) =>
      button(text, () => pick(value), { "aria-pressed": String(value === chosen), title, "data-value": value }),
    ),
  );
}

// A search box that says what is typed after a short pause.
export function searchField(placeholder, text, changed) {
  let waiting = 0;
  return h("input.search", {
    type: "search",
    placeholder,
    value: text,
    "aria-label": "search",
    oninput: (event) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => changed(event.target.value), 150);
    },
  });
}

export const table = (heads, rows, more = {}) =>
  h(
    "div.scroll",
    {},
    h(
      "table",
      more,
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((head) => (head instanceof Node ? head : h("th", { scope: "col" }, head))),
        ),
      ),
      h("tbody", {}, rows),
    ),
  );

export const empty = (title, ...text) => h("div.empty", {}, h("h2", {}, title), h("p", {}, ...text));

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
