// The sample buffer: its size and age, right against wrong, what was evicted, and the hardest queries.

import { ask } from "./api.js";
import { Chart } from "./charts.js";
import { bytes, empty, fill, h, number, percent } from "./dom.js";
import { tableOfQueries } from "./queries.js";

export async function bufferPage(root, { run, go }) {
  let page = await ask("buffer", { run });
  if (page.problem) {
    fill(root, h("h1", {}, "Buffer"), empty("No buffer to show", page.problem));
    return {};
  }
  const charts = [
    new Chart({ title: "Samples held", note: "after each step", stacked: true, read: () => overTime(page) }),
    new Chart({ title: "Evicted so far", note: "samples that made room", read: () => evictions(page) }),
    new Chart({
      title: "Age",
      note: "samples held, by the step that drew them",
      stacked: true,
      read: () => byAge(page),
    }),
  ];
  const tiles = h("div.tiles");
  const hardest = h("div");
  const draw = () => {
    fill(tiles, tilesOf(page));
    fill(hardest, hardestTable(run, page));
    for (const chart of charts) chart.update();
  };
  fill(
    root,
    h("div.toolbar", {}, h("h1", {}, "Buffer"), h("span.quiet", {}, limitsOf(page.limits))),
    tiles,
    h(
      "div.grid",
      {},
      charts.map((chart) => chart.element),
    ),
    hardest,
  );
  draw();
  let step = page.stats.newest_step;
  const update = async (state) => {
    if (state.step === step) return;
    step = state.step;
    page = await ask("buffer", { run });
    draw();
  };
  return { update, go };
}

const limitsOf = (limits) =>
  [
    limits.per_query && `at most ${number(limits.per_query)} a query`,
    limits.total && `${number(limits.total)} in all`,
    limits.max_age && `replayed up to ${number(limits.max_age)} updates old`,
  ]
    .filter(Boolean)
    .join(", ");

function tilesOf({ stats, never_solved: never, over_time: at }) {
  const tile = (label, value, more) =>
    h("div.tile", {}, h("span", {}, label), h("b", {}, value), h("small", {}, more || "\u00a0"));
  return [
    tile("samples", number(stats.samples), `${number(stats.tokens)} tokens`),
    tile("right", percent(stats.samples ? stats.right / stats.samples : null), `${number(stats.wrong)} wrong`),
    tile("truncated", percent(stats.samples ? stats.truncated / stats.samples : null), number(stats.truncated)),
    tile("queries", number(stats.queries), `${number(never)} never solved`),
    tile(
      "oldest",
      stats.oldest_step === null ? "–" : `step ${number(stats.oldest_step)}`,
      `newest: step ${number(stats.newest_step)}`,
    ),
    tile("evicted", number(at.evicted[at.evicted.length - 1] ?? 0), `${number(stats.evicted)} kept for a rewind`),
    tile(
      "on disk",
      bytes(stats.bytes_on_disk),
      `${stats.tokens ? (stats.bytes_on_disk / stats.tokens).toFixed(1) : "–"} bytes per token`,
    ),
  ];
}

function overTime({ over_time: at }) {
  const parts = [
    ["right", "--blue"],
    ["wrong", "--vermillion"],
    ["unverified", "--grey"],
  ].filter(([name]) => at[name].some(Boolean));
  return {
    data: [at.step, ...parts.map(([name]) => at[name])],
    series: parts.map(([label, colour]) => ({ label, colour })),
  };
}

const evictions = ({ over_time: at }) => ({
  data: [at.step, at.evicted],
  series: [{ label: "evicted", colour: "--purple" }],
});

const byAge = ({ by_age: at }) => ({
  data: [at.step, at.right, at.wrong],
  series: [
    { label: "right", colour: "--blue", bars: true },
    { label: "wrong", colour: "--vermillion", bars: true },
  ],
});

function hardestTable(run, { hardest }) {
  if (!hardest.length) return null;
  const lastTried = (query) => `step ${number(query.last_step)}`;
  return tableOfQueries(run, "Hardest queries", hardest, [["Last tried", lastTried]]);
}
