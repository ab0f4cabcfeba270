// Elements made from data, and small drawings that stand for a sample or a group. Text from a run only ever becomes a
// text node: nothing here parses HTML.

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

// Colours that colour-blind people can tell apart: Okabe and Ito's.

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

// Outcomes as shapes and colours, advantages as bars, badges.

// right, wrong or truncated: shown by shape as well as by colour.
export function outcomeOf(outcome, truncated) {
  if (outcome === true) return "right";
  if (truncated) return "truncated";
  return outcome === false ? "wrong" : "unverified";
}

export function dot(outcome, { replayed = false, title = null } = {}) {
  const shapes = {
    right: () => h("circle", { cx: 7, cy: 7, r: 5 }),
    wrong: () => h("circle", { cx: 7, cy: 7, r: 4, "stroke-width": 2 }),
    truncated: () => h("path", { d: "M10.500 3.500 A5 5 0 1 0 10.500 10.500", "stroke-width": 2 }),
    unverified: () => h("line", { x1: 3, x2: 11, y1: 7, y2: 7, "stroke-width": 2 }),
  };
  const label = title || `${outcome}${replayed ? ", replayed" : ""}`;
  return h(
    `svg.dot.${outcome}${replayed ? ".replayed" : ""}`,
    { viewBox: "0 0 14 14", role: "img", "aria-label": label },
    h("title", {}, label),
    replayed && h("rect", { x: 0.5, y: 0.5, width: 13, height: 13, rx: 3 }),
    shapes[outcome](),
  );
}

export function dots(summary) {
  return h(
    "span.dots",
    {},
    summary.outcomes.map((outcome, i) => {
      const replayed = i >= summary.fresh;
      const word = outcomeOf(outcome, summary.truncated[i]);
      if (!replayed) return dot(word);
      const source = SOURCES[originOf(summary, i)];
      return dot(word, { replayed, title: `${word}, ${source || `replayed from ${whence(summary.steps[i])}`}` });
    }),
  );
}

// One bar per sample, up for a positive advantage, down for a negative one.
export function advantageBars(advantages, fresh) {
  const width = 7;
  const most = Math.max(...advantages.map((value) => Math.abs(value || 0)), 1e-9);
  return h(
    "svg.bars",
    {
      viewBox: `0 0 ${Math.max(advantages.length * width, 1)} 24`,
      width: advantages.length * width,
      height: 24,
      role: "img",
      "aria-label": `advantages ${advantages.map(signed).join(", ")}`,
    },
    h("line", { x1: 0, x2: advantages.length * width, y1: 12, y2: 12 }),
    advantages.map((value, i) => {
      const tall = Math.max(value ? 1.5 : 0, (11 * Math.abs(value || 0)) / most);
      return h(
        `rect.${value > 0 ? "up" : "down"}${i >= fresh ? ".replayed" : ""}`,
        { x: i * width + 1, width: width - 2, height: tall, y: value > 0 ? 12 - tall : 12 },
        h("title", {}, `sample ${i}: ${signed(value)}`),
      );
    }),
  );
}

export const solveKind = (summary) => {
  const fresh = summary.outcomes.slice(0, summary.fresh);
  if (fresh.every((outcome) => outcome === true)) return "solve-all";
  return fresh.some((outcome) => outcome === true) ? "mixed" : "solve-none";
};
export const teaches = (summary) => summary.advantages.some((value) => value);
export const rankedCount = (summary) => summary.ranking.filter((paid) => paid !== null && paid !== undefined).length;

// Where a past answer comes from. Steps count from 1: an answer of an earlier run (buffer.successes_from) has step 0, no
// id in this run's buffer, and no age in its updates.
const isOfEarlierRun = (step) => step === 0;
export const whence = (step) => (isOfEarlierRun(step) ? "an earlier run" : `step ${step}`);

// Where answers come from that joined a group and are not replayed.
export const SOURCES = {
  critique: "a refinement of a failure of this step",
  demonstration: "a demonstration from the data",
};

// In runs of earlier versions replay was all that let answers join.
const originOf = (summary, i) => (summary.origins || [])[i - summary.fresh] || "replayed";

// Origin, step and age in updates of each answer that joined; no age if it is from an earlier run.
export function joins(summary) {
  const now = summary.versions[0];
  return summary.steps.slice(summary.fresh).map((step, i) => {
    const age = now - summary.versions[summary.fresh + i];
    const origin = originOf(summary, summary.fresh + i);
    return { origin, step, age: Number.isFinite(age) && !isOfEarlierRun(step) ? age : null };
  });
}

export const replays = (summary) => joins(summary).filter((one) => one.origin === "replayed");
export const isHelped = (summary) =>
  ["hint", "critique"].includes(summary.context) || joins(summary).some((one) => SOURCES[one.origin]);

export const aged = ({ origin, step, age }) =>
  SOURCES[origin] || (age === null ? whence(step) : `${whence(step)}, age ${age}`);

const ASKED_WITH = { hint: "asked with a hint", critique: "refines a failure of this step" };

const WHY_NOT = {
  no_history: "no past answer of the other outcome",
  too_old: "past answers too old",
  too_few: "too few past answers yet",
  off: "replay is off",
  helped: "its answers count in another group, or not at all",
};

// What R³ did to a group, in a few words each.
function deeds(summary) {
  const found = [];
  const joined = replays(summary);
  if (summary.context === "reflection") {
    found.push([
      "reflection",
      summary.shown === null || summary.shown === undefined ? "reflection" : `reflects on #${summary.shown}`,
    ]);
  }
  if (ASKED_WITH[summary.context]) found.push([summary.context, ASKED_WITH[summary.context]]);
  for (const [origin, source] of Object.entries(SOURCES)) {
    const count = joins(summary).filter((one) => one.origin === origin).length;
    if (count) found.push([origin, count > 1 ? `${source} joined, ×${count}` : `${source} joined`]);
  }
  const earlier = joined.filter((one) => isOfEarlierRun(one.step));
  const past = joined.filter((one) => !isOfEarlierRun(one.step));
  if (past.length) {
    const steps = [...new Set(past.map((one) => one.step))];
    const oldest = Math.max(...past.map((one) => one.age ?? 0));
    found.push([
      "replay",
      `${past.length} replayed from ${steps.length === 1 ? "step" : "steps"} ${steps.slice(0, 3).join(", ")}${steps.length > 3 ? "…" : ""}, age ${oldest}`,
    ]);
  }
  if (earlier.length) found.push(["replay", `${earlier.length} replayed from an earlier run`]);
  const ranked = rankedCount(summary);
  if (ranked) found.push(["ranking", `${ranked} ranked`]);
  if (!found.length && WHY_NOT[summary.replay] && solveKind(summary) !== "mixed")
    found.push(["idle", WHY_NOT[summary.replay]]);
  if (!teaches(summary)) found.push(["idle", "taught nothing"]);
  return found;
}

export const badges = (summary) =>
  h(
    "span.badges",
    {},
    deeds(summary).map(([kind, text]) => h(`span.badge.${kind}`, {}, text)),
  );

// A sentence or two on why this group taught what it did, or nothing.
export function story(summary) {
  const kind = solveKind(summary);
  const fresh = summary.fresh;
  const cut = summary.truncated.slice(0, fresh).filter(Boolean).length;
  const right = summary.outcomes.slice(0, fresh).filter((outcome) => outcome === true).length;
  const said = [];
  if (kind === "mixed")
    said.push(
      `${right} of ${fresh} answers ${right === 1 ? "was" : "were"} right, so they could be compared with each other.`,
    );
  else
    said.push(
      `All ${fresh} answers were ${kind === "solve-all" ? "right (solve-all)" : "wrong (solve-none)"}: by themselves they teach nothing.`,
    );
  if (cut) said.push(`${plural(cut, "answer was", "answers were")} cut by the length limit.`);
  const joined = replays(summary);
  if (joined.length) {
    said.push(
      `Replay brought in ${plural(joined.length, "past answer")} of the other outcome: ${joined.map((one) => (one.age === null ? whence(one.step) : `step ${one.step}, ${plural(one.age, "update")} old`)).join("; ")}.`,
    );
  }
  for (const one of joins(summary)) if (SOURCES[one.origin]) said.push(`It was joined by ${SOURCES[one.origin]}.`);
  if (summary.context === "plain" && summary.replay === "helped")
    said.push("A group that was asked with a hint took its place, and this one is not trained on.");
  else if (!joins(summary).length && kind !== "mixed" && summary.context === "plain") {
    said.push(`Replay brought nothing: ${WHY_NOT[summary.replay] || summary.replay}.`);
  }
  if (summary.context === "reflection") said.push("It was asked under a reflection prompt, which takes no replay.");
  if (ASKED_WITH[summary.context])
    said.push(
      summary.context === "hint"
        ? "It was asked with a hint, since no answer to the plain prompt was right."
        : "A failure of this step was shown, with what was said of it; a right refinement joins the plain group.",
    );
  const ranked = rankedCount(summary);
  if (ranked) said.push(`The ranking reward ordered ${plural(ranked, "answer")} by the structure of their entropy.`);
  said.push(teaches(summary) ? "" : "Every advantage is 0: the group taught nothing.");
  return said.filter(Boolean).join(" ");
}
