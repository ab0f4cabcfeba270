// The overview: a few numbers, then the curves of all runs on one axis of steps.

import { Chart, forgetCharts, isZoomed, repaint, zoomTo } from "./charts.js";
import { aligned, column, epochs, latest, LINES, smooth, store, yieldLines } from "./data.js";
import { button, empty, fill, h, KINDS, number, percent } from "./dom.js";

const view = { smoothing: 0, focus: 0, hidden: new Set() };

const STAGES = ["rollout", "update", "method", "history", "buffer", "prompts"];

export function overviewPage(root, { go }) {
  const shown = store.runs.map((_, run) => run).filter((run) => store.runs[run].steps.length);
  if (!shown.length) {
    fill(root, empty("No steps yet", "The run has not finished its first step. This page updates itself."));
    return {
      update: () => {
        if (store.runs.some((run) => run.steps.length)) overviewPage(root, { go });
      },
    };
  }
  const open = (step) => {
    if (step > 0) go(`${view.focus}/steps/${step}`);
  };
  const yields = yieldLines(store.runs.map((run) => run.columns));
  const charts = makeCharts(open);
  const yieldCharts = yields.map((spec) => lineChart(spec, open));
  const tiles = h("div.tiles");
  const refresh = () => {
    fill(tiles, tileRow());
    for (const chart of [...charts, ...yieldCharts]) chart.update();
  };
  const update = () => {
    if (yieldLines(store.runs.map((run) => run.columns)).length === yields.length) return refresh();
    forgetCharts(); // a mechanism acted for the first time
    return overviewPage(root, { go });
  };
  fill(
    root,
    toolbar(refresh),
    tiles,
    h(
      "div.grid",
      {},
      charts.map(elementOf),
    ),
    yieldCharts.length > 0 &&
      h("section.yields", {}, h("h2", {}, "What the mechanisms bring"), h("div.grid", {}, yieldCharts.map(elementOf))),
    h(
      "p.hint",
      {},
      "Click a chart to open that step. Drag to zoom; ",
      h("kbd", {}, "0"),
      " shows all again. ",
      h("kbd", {}, "←"),
      " ",
      h("kbd", {}, "→"),
      " move the cursor, ",
      h("kbd", {}, "Enter"),
      " opens its step.",
    ),
  );
  refresh();
  return { update, open };
}

const elementOf = (chart) => chart.element;

const lineChart = (spec, open) =>
  new Chart({
    title: spec.title,
    note: store.runs.length > 1 ? spec.parts[0][1] : spec.note,
    format: spec.format || number,
    range: spec.range,
    open,
    read: () => readLines(spec),
  });

function makeCharts(open) {
  const lines = LINES.map((spec) => lineChart(spec, open));
  const groups = new Chart({
    title: "Groups",
    note: "share by outcome",
    format: percent,
    stacked: true,
    open,
    read: readGroups,
  });
  const seconds = new Chart({ title: "Seconds per step", note: "by stage", stacked: true, open, read: readSeconds });
  return [lines[0], lines[1], groups, lines[2], ...lines.slice(3), seconds];
}

const visibleRuns = () => store.runs.map((_, run) => run).filter((run) => !view.hidden.has(run));
const marks = () => epochs(view.focus).map(([step, epoch]) => [step, `epoch ${epoch}`]);
// Step 0 is the evaluation before training: it has held-out accuracy and nothing else.
const trained = (run, key) => ({
  steps: store.runs[run].steps,
  values: typeof key === "function" ? key(store.runs[run].columns) : column(run, key),
});

function readLines(spec) {
  const many = store.runs.length > 1;
  const series = [];
  const parts = [];
  const add = (run, [key, label, kind], one) => {
    const part = trained(run, key);
    // No line for what this run does not have: a part of the reward, or reflection.
    if (!part.values.some((value) => (label === spec.parts[0][1] || many ? value !== null : value))) return;
    const line = { label, colour: one, points: kind === "points", dash: kind === "dashed" ? [4, 3] : undefined };
    if (view.smoothing && !line.points) {
      series.push({ ...line, quiet: true });
      parts.push(part);
    }
    series.push(line);
    parts.push(line.points ? part : { ...part, values: smooth(part.values, view.smoothing) });
  };
  if (many) {
    const wanted = spec.parts.filter((part, i) => i === 0 || part[2] === "points");
    for (const run of visibleRuns()) {
      for (const [key, , kind] of wanted) {
        add(run, [key, `${store.about[run].name}${kind ? ", held-out" : ""}`, kind], runColour(run));
      }
    }
  } else spec.parts.forEach((part, i) => add(0, part, KINDS[i]));
  return { data: aligned(parts), series, marks: marks() };
}

export const runColour = (run) => KINDS[run % KINDS.length];

function stackOf(parts) {
  const first = store.runs[view.focus].steps.findIndex((step) => step > 0);
  const steps = first < 0 ? [] : store.runs[view.focus].steps.slice(first);
  const columns = parts.map(({ values }) => smooth(values.slice(Math.max(first, 0)), view.smoothing));
  return { data: [steps, ...columns], series: parts, marks: marks() };
}

function readGroups() {
  const none = column(view.focus, "solve_none");
  const all = column(view.focus, "solve_all");
  const mixed = none.map((value, i) => (value === null ? null : Math.max(0, 1 - value - all[i])));
  return stackOf([
    { label: "solve-none", colour: "--vermillion", values: none },
    { label: "mixed", colour: "--green", values: mixed },
    { label: "solve-all", colour: "--blue", values: all },
  ]);
}

function readSeconds() {
  const stages = STAGES.map((stage) => column(view.focus, `seconds/${stage}`));
  const whole = column(view.focus, "seconds/step");
  const rest = whole.map((value, i) =>
    value === null ? null : Math.max(0, value - stages.reduce((sum, values) => sum + (values[i] || 0), 0)),
  );
  const parts = STAGES.map((stage, i) => ({ label: stage, colour: KINDS[i], values: stages[i] }));
  return stackOf([...parts, { label: "other", colour: "--grey", values: rest }].filter(({ values }) => values.length));
}

function tileRow() {
  const run = view.focus;
  const held = column(run, "heldout/accuracy").filter((value) => value !== null);
  const state = store.state[run] || {};
  const tile = (label, value, more) =>
    h("div.tile", {}, h("span", {}, label), h("b", {}, value), h("small", {}, more || "\u00a0"));
  return [
    tile("step", number(state.step), state.planned ? `of ${number(state.planned)}` : ""),
    tile("accuracy", percent(latest(run, "accuracy")), "as sampled"),
    tile("held-out", percent(held[held.length - 1] ?? null), held.length > 1 ? `${percent(held[0])} before` : ""),
    tile("solve-none", percent(latest(run, "solve_none")), `solve-all ${percent(latest(run, "solve_all"))}`),
    tile("truncated", percent(latest(run, "truncated")), `${number(latest(run, "length/mean"))} tokens each`),
    tile(
      "groups that taught",
      percent(ratio(latest(run, "groups/teaching"), latest(run, "groups"))),
      `of ${number(latest(run, "groups"))}`,
    ),
    tile("replayed", number(latest(run, "replay/samples")), `mean age ${number(latest(run, "replay/age_mean"))}`),
    tile("tokens/s", number(latest(run, "tokens_per_second")), `${number(latest(run, "seconds/step"))} s per step`),
  ];
}

const ratio = (part, whole) => (part === null || !whole ? null : part / whole);

function toolbar(refresh) {
  const slider = h("input", {
    type: "range",
    min: 0,
    max: 0.98,
    step: 0.02,
    value: view.smoothing,
    id: "smoothing",
    oninput: (event) => {
      view.smoothing = Number(event.target.value);
      shown.textContent = view.smoothing.toFixed(2);
      refresh();
    },
  });
  const shown = h("output", { for: "smoothing" }, view.smoothing.toFixed(2));
  const reset = button(
    "Show all steps",
    () => {
      zoomTo(null);
      reset.disabled = true;
    },
    { id: "reset-zoom", disabled: !isZoomed() },
  );
  document.addEventListener("r3-zoom", () => {
    reset.disabled = !isZoomed();
  });
  return h(
    "div.toolbar",
    {},
    store.runs.length > 1 && runChooser(refresh),
    h("label", { for: "smoothing" }, "Smoothing ", slider, " ", shown),
    reset,
  );
}

function runChooser(refresh) {
  const place = h("div.runs", { role: "group", "aria-label": "runs" });
  const draw = () =>
    fill(
      place,
      store.about.map((about, run) =>
        h(
          "span.run",
          {},
          h(
            "label",
            {},
            h("input", {
              type: "checkbox",
              checked: !view.hidden.has(run),
              onchange: (event) => {
                if (event.target.checked) view.hidden.delete(run);
                else view.hidden.add(run);
                repaint();
                refresh();
              },
            }),
            h("i.key", { style: { color: `var(${runColour(run)})` } }),
            about.name,
          ),
          button(
            "details",
            () => {
              view.focus = run;
              draw();
              refresh();
            },
            { "aria-pressed": String(view.focus === run), title: "tiles and stacked charts show this run" },
          ),
        ),
      ),
    );
  draw();
  return place;
}

export const setFocus = (run) => {
  view.focus = run;
};
