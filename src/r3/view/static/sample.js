// The text of one sample: token by token, and against the attempt that it was shown.

import { choice, fill, h, isDark, number, plural, signed, visible } from "./dom.js";

// A response token by token, each coloured by a number that was saved with it; peak tokens underlined.

const CHUNK = 2500;
const MEASURES = [
  ["entropies", "Entropy", "how undecided the policy was at this token"],
  ["logprobs", "Log-prob", "how likely the token was when it was drawn"],
  ["ratios", "Ratio", "importance ratio: the policy at the update against the one that drew it"],
  ["advantage", "Advantage", "one advantage for every token of a sample"],
  ["none", "Plain", "no colours"],
];
const chosenMeasure = { name: "entropies" };

export function heatMap(sample) {
  const place = h("div.response", { tabindex: 0, "aria-label": "response" });
  const facts = h("div.facts", {}, "Point at a token.");
  const key = h("div.keys");
  const bar = h("div");
  const draw = () => {
    const measure = measured(sample);
    fill(
      bar,
      choice(
        "colour by",
        MEASURES.map(([value, text, title]) => [value, text, title]),
        chosenMeasure.name,
        (value) => {
          chosenMeasure.name = value;
          draw();
        },
      ),
    );
    fill(key, legend(sample, measure));
    drawTokens(place, facts, sample, measure);
  };
  draw();
  return h("div.heat", {}, h("div.toolbar", {}, bar, key), facts, place);
}

// What to colour: { values, paint, low, high, why } for the chosen measure.
function measured(sample) {
  const name = chosenMeasure.name;
  if (name === "none") return { values: null };
  if (name === "advantage") {
    const values = new Array(sample.tokens.length).fill(sample.advantage ?? 0);
    return { values, paint: (value) => departure(value / 2.5), low: "−2.5", high: "+2.5", keyOf: departureKey };
  }
  const values = sample[name];
  if (!values.length) return { values: null, why: missing(name, sample) };
  if (name === "ratios") {
    const log = (value) => Math.log2(Math.max(value, 1e-6));
    return { values, paint: (value) => departure(log(value)), low: "½", high: "2", keyOf: departureKey };
  }
  const amounts = name === "logprobs" ? values.map((value) => -value) : values;
  const most = Math.max(...amounts.slice(0, 50_000), 1e-6);
  return {
    values,
    paint: (value) => amount((name === "logprobs" ? -value : value) / most),
    keyOf: amountKey,
    low: "0",
    high: number(name === "logprobs" ? -most : most),
  };
}

function missing(name, sample) {
  if (name === "ratios") {
    return sample.advantage === 0
      ? "not trained on: its advantage is 0"
      : "no ratio was saved: trained under another prompt than it was drawn under, or by an earlier version";
  }
  return "not saved with this sample";
}

function legend(sample, measure) {
  if (measure.why) return h("span.quiet", {}, measure.why);
  const peaks = sample.peaks.length
    ? h("span.entry", {}, h("i.peak", {}, "ab"), plural(sample.peaks.length, "peak token"))
    : null;
  if (!measure.values) return peaks;
  return [
    h("span.entry", {}, measure.low, h("i.ramp", { style: { background: measure.keyOf() } }), measure.high),
    peaks,
  ];
}

function drawTokens(place, facts, sample, measure) {
  const peaks = new Set(sample.peaks);
  const count = sample.tokens.length;
  fill(place);
  if (!sample.pieces && !count) {
    place.append(visible(sample.response));
    return;
  }
  if (!sample.pieces)
    place.append(
      h(
        "p.quiet",
        {},
        "The texts of single tokens were not saved; each block is one token. The whole response is below.",
      ),
    );
  let drawn = 0;
  const end = h("span.end");
  place.append(end);
  const more = () => {
    const part = document.createDocumentFragment();
    for (const stop = Math.min(drawn + CHUNK, count); drawn < stop; drawn += 1)
      part.append(token(sample, measure, peaks, drawn));
    end.before(part);
    if (drawn >= count) {
      watcher.disconnect();
      finish();
    }
  };
  const finish = () => {
    end.before(h("span.stop", {}, sample.finish === "length" ? "✂ cut by the length limit" : "end"));
    if (!sample.pieces) end.before(h("p.whole", {}, sample.response));
  };
  const watcher = new IntersectionObserver(
    (seen) => {
      if (seen.some((one) => one.isIntersecting)) more();
    },
    { rootMargin: "600px" },
  );
  more();
  if (drawn < count) watcher.observe(end);
  place.onpointerover = (event) => tell(facts, sample, event.target);
  place.onclick = (event) => tell(facts, sample, event.target);
}

function token(sample, measure, peaks, at) {
  const text = sample.pieces ? sample.pieces[at] : "▮";
  const span = h(
    `span.tok${peaks.has(at) ? ".peak" : ""}`,
    { "data-at": at },
    text || (at === sample.tokens.length - 1 && sample.finish === "stop" ? "■" : "·"),
  );
  if (measure.values && measure.values[at] !== undefined) {
    const { background, color } = measure.paint(measure.values[at]);
    span.style.backgroundColor = background;
    if (color) span.style.color = color;
  }
  return span;
}

function tell(facts, sample, target) {
  const at = Number(target.dataset && target.dataset.at);
  if (!target.dataset || target.dataset.at === undefined) return;
  const value = (name) => (sample[name].length ? number(sample[name][at]) : "–");
  const text = sample.pieces ? JSON.stringify(visible(sample.pieces[at])).slice(0, 60) : "";
  fill(
    facts,
    h("b", {}, `token ${at + 1} of ${sample.tokens.length}`),
    ` ${text} id ${sample.tokens[at]}`,
    [
      ["entropy", value("entropies")],
      ["log-prob", value("logprobs")],
      ["ratio", value("ratios")],
      ["advantage", signed(sample.advantage)],
    ].map(([name, told]) => h("span", {}, `${name} `, h("b", {}, told))),
    sample.peaks.includes(at) && h("span.badge.ranking", {}, "peak"),
  );
}

// What an answer kept and what it changed of the attempt it was shown, word by word.

const MOST = 1200;

function wordsOf(text) {
  return text.match(/\s+|[A-Za-zÀ-ɏ]+|\d+|[^\sA-Za-zÀ-ɏ\d]/gu) || [];
}

// [["same" | "gone" | "new", text]]: the longest common subsequence, after equal ends are cut off.
function difference(before, after) {
  const [a, b] = [wordsOf(before), wordsOf(after)];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const middle = compared(a.slice(start, a.length - end), b.slice(start, b.length - end));
  return joined([["same", a.slice(0, start).join("")], ...middle, ["same", a.slice(a.length - end).join("")]]);
}

function compared(a, b) {
  if (a.length > MOST || b.length > MOST)
    return [
      ["gone", a.join("")],
      ["new", b.join("")],
    ];
  const longest = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      longest[i][j] = a[i] === b[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
    }
  }
  const found = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      found.push(["same", a[i]]);
      i += 1;
      j += 1;
    } else if (i < a.length && (j === b.length || longest[i + 1][j] >= longest[i][j + 1])) {
      found.push(["gone", a[i]]);
      i += 1;
    } else {
      found.push(["new", b[j]]);
      j += 1;
    }
  }
  return found;
}

function joined(parts) {
  const found = [];
  for (const [kind, text] of parts) {
    if (!text) continue;
    if (found.length && found[found.length - 1][0] === kind) found[found.length - 1][1] += text;
    else found.push([kind, text]);
  }
  return found;
}

export const diffView = (before, after) =>
  h(
    "div.diff",
    {},
    difference(before, after).map(([kind, text]) => h({ same: "span", gone: "del", new: "ins" }[kind], {}, text)),
  );

// Colours for amounts.

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
function amount(share) {
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
function departure(share) {
  const strength = Math.min(1, Math.abs(share));
  return painted(share < 0 ? LOW : HIGH, strength, isDark());
}

const wide = () => [0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1];
const amountKey = () =>
  `linear-gradient(90deg, ${wide()
    .map((x) => amount(x).background)
    .join(", ")})`;
const departureKey = () =>
  `linear-gradient(90deg, ${wide()
    .map((x) => departure(2 * x - 1).background)
    .join(", ")})`;
