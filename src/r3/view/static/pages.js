// The pages of the buffer and of the settings.

import { Chart } from "./charts.js";
import { ask } from "./data.js";
import { bytes, choice, empty, fill, h, number, percent, plural, searchField, table } from "./dom.js";
import { tableOfQueries } from "./queries.js";

// The sample buffer: its size and age, right against wrong, what was evicted, and the hardest queries.

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

// The settings of a run, section by section, beside their defaults; and how it was started.

const chosen = { which: "all", text: "" };

export async function settingsPage(root, { run }) {
  const answer = await ask("settings", { run });
  if (!answer.sections.length) {
    fill(root, h("h1", {}, "Settings"), empty("No settings to show", "The run's config.yaml cannot be read."));
    return {};
  }
  const all = answer.sections.flatMap((section) => section.settings);
  const filters = h("div");
  const tables = h("div.sections");
  const draw = () => {
    fill(
      filters,
      choice(
        "settings",
        [
          ["all", `All ${all.length}`, "every setting, as the run resolved it"],
          ["changed", `Changed ${all.filter((one) => one.changed).length}`, "other than the default or its preset"],
        ],
        chosen.which,
        (value) => {
          chosen.which = value;
          draw();
        },
      ),
    );
    const drawn = answer.sections.map((section) => sectionTable(section, section.settings.filter(matches)));
    fill(tables, drawn.some(Boolean) ? drawn : empty("No such setting", "No setting of this run matches."));
  };
  const field = searchField("Search setting, value, help", chosen.text, (text) => {
    chosen.text = text;
    draw();
  });
  fill(
    root,
    h("div.toolbar", {}, h("h1", {}, "Settings"), filters, field),
    startCard(answer),
    answer.problems.map((problem) => h("p.quiet", {}, problem)),
    tables,
  );
  draw();
  return {};
}

function matches(one) {
  if (chosen.which === "changed" && !one.changed) return false;
  const text = `${one.key}\n${valueText(one.value)}\n${one.help || ""}`.toLowerCase();
  return text.includes(chosen.text.toLowerCase());
}

function startCard({ command, created, versions, resumed_from: resumes }) {
  const known = Object.entries(versions).filter(([, version]) => version);
  const fact = (name, ...value) => h("div", {}, h("dt", {}, name), h("dd", {}, ...value));
  const last = resumes[resumes.length - 1];
  return h(
    "dl.card.factrow.start",
    {},
    created && fact("started", created.replace("T", " ").replace("+00:00", " UTC")),
    resumes.length > 0 && fact("resumed", plural(resumes.length, "time"), h("small", {}, `last from step ${last}`)),
    known.map(([name, version]) => fact(name, version)),
    command && h("div.command", {}, h("dt", {}, "command"), h("dd", {}, h("pre", {}, command))),
  );
}

// As a recipe would write it, so that an empty text shows too.
function valueText(value) {
  if (value === "") return '""';
  return typeof value === "string" ? value : JSON.stringify(value);
}

function sectionTable(section, settings) {
  if (!settings.length) return null;
  const whole = table(
    ["Setting", "Value", "Default"],
    settings.map((one) =>
      h(
        `tr${one.changed ? ".changed" : ""}`,
        { "data-key": one.key },
        h("td.key-name", {}, h("code", {}, one.key), one.help && h("small", {}, one.help)),
        h("td.value", {}, h("pre", {}, valueText(one.value))),
        h("td.default", { "data-name": "default" }, defaultOf(one)),
      ),
    ),
  );
  whole.querySelector("table").classList.add("settings");
  return h("section", {}, h("h2", {}, section.name, section.help && h("span.note", {}, section.help)), whole);
}

function defaultOf(one) {
  if (!one.changed) return null;
  return "default" in one ? h("pre", {}, valueText(one.default)) : h("span.quiet", {}, "none");
}
