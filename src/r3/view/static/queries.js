// All queries with their success rates, and one query through time.

import { Chart } from "./charts.js";
import { ask } from "./data.js";
import { choice, empty, fill, h, number, percent, plural, searchField, table } from "./dom.js";
import { badges, dots } from "./marks.js";

const listed = { search: "", order: "hardest" };
const ORDERS = [
  ["hardest", "Hardest"],
  ["easiest", "Easiest"],
  ["newest", "Newest"],
  ["replayed", "Most replayed"],
];

export async function queriesPage(root, { run, go }) {
  const place = h("div");
  const orders = h("div");
  let seen = -1;
  const draw = async () => {
    const answer = await ask("queries", { run, search: listed.search, order: listed.order });
    seen = answer.steps;
    fill(
      orders,
      choice("order", ORDERS, listed.order, (value) => {
        listed.order = value;
        draw();
      }),
    );
    fill(
      place,
      note(answer),
      answer.queries.length
        ? queryTable(run, answer.queries)
        : empty("No query found", answer.known ? "None holds that text." : "No group was saved yet."),
    );
  };
  const field = searchField("Search query id or question", listed.search, (text) => {
    listed.search = text;
    draw();
  });
  fill(root, h("div.toolbar", {}, h("h1", {}, "Queries"), orders, field), place);
  await draw();
  return {
    update: (state) => {
      if (state.indexed !== seen) draw();
    },
    go,
  };
}

const note = (answer) =>
  h(
    "p.quiet",
    {},
    `${plural(answer.matching, "query", "queries")}${answer.matching > answer.queries.length ? `, the first ${answer.queries.length} shown` : ""}`,
    answer.steps < answer.saved && `; ${number(answer.steps)} of ${number(answer.saved)} steps read so far`,
  );

function rateBar(solved, tried) {
  return h(
    "span.rate",
    { title: `${solved} right of ${tried}` },
    h("span.track", {}, h("i", { style: { width: `${tried ? (100 * solved) / tried : 0}%` } })),
    h("b", {}, tried ? percent(solved / tried) : "–"),
    h("small", {}, `${number(solved)}/${number(tried)}`),
  );
}

const queryTable = (run, queries) =>
  tableOfQueries(run, "Query", queries, [
    ["Reflections", (query) => number(query.reflections)],
    ["Replays", (query) => number(query.replays)],
    ["Last step", (query) => number(query.last)],
  ]);

// What a query asks, unless its id already says it.
export const questionLine = (query) =>
  query.question && query.question.trim() !== query.query ? h("span.line", {}, query.question) : null;

// Queries with their success rates and further columns: [head, what a query has there].
export function tableOfQueries(run, title, queries, columns) {
  const whole = table(
    [title, "Solved, plain prompt", ...columns.map(([head]) => head)],
    queries.map((query) =>
      h(
        "tr",
        { "data-row": true },
        h(
          "td.question",
          {},
          h("a", { href: `#/${run}/query/${encodeURIComponent(query.query)}`, "data-open": true }, query.query),
          questionLine(query),
        ),
        h("td.rates", {}, rateBar(query.solved, query.tried)),
        columns.map(([head, cell]) => h("td.number", { "data-name": head.toLowerCase() }, cell(query))),
      ),
    ),
  );
  whole.querySelector("table").classList.add("queries");
  return whole;
}

export async function queryPage(root, { run, parts, go }) {
  const id = decodeURIComponent(parts[0]);
  const answer = await ask("query", { run, id });
  const chart = new Chart({
    title: "Success rate",
    note: "of each group",
    format: percent,
    range: () => [-0.04, 1.12],
    read: () => readRates(answer),
    open: (step) => openStep(run, answer, step, go),
  });
  const first = answer.first_solved;
  const replayed = answer.visits.filter((visit) => visit.replayed).map((visit) => visit.step);
  const told = first
    ? [
        "First solved at ",
        h("a", { href: `#/${run}/group/${first.step}/${first.group}` }, `step ${first.step}`),
        ` under the ${first.context} prompt.`,
      ]
    : ["Not solved so far."];
  fill(
    root,
    h("div.toolbar.head", {}, h("h1", {}, "Query ", id), h("a", { href: `#/${run}/queries` }, "all queries")),
    answer.question !== id && h("pre.card.prompt", {}, answer.question),
    h(
      "p.story",
      {},
      told,
      ` ${plural(answer.visits.length, "group")} in ${number(answer.indexed)} saved steps. `,
      replayed.length
        ? `Past answers were replayed at ${replayed.length === 1 ? "step" : "steps"} ${replayed.slice(0, 12).join(", ")}${replayed.length > 12 ? "…" : ""}.`
        : "Never replayed.",
    ),
    chart.element,
    visitTable(run, answer.visits),
  );
  chart.update();
  const indexed = answer.indexed;
  return {
    update: (state) => {
      if (state.indexed !== indexed && state.indexed >= answer.saved)
        go(`${run}/query/${encodeURIComponent(id)}`, true);
    },
  };
}

// The buffer's ledger has every attempt, also those of steps whose rollouts were not saved.
function readRates(answer) {
  const entries = answer.ledger.length ? answer.ledger : answer.visits;
  const steps = [...new Set(entries.map((entry) => entry.step))].sort((a, b) => a - b);
  const rates = (context) =>
    steps.map((step) => {
      const here = entries.filter((entry) => entry.step === step && entry.context === context);
      const tried = here.reduce((sum, entry) => sum + entry.tried, 0);
      return tried ? here.reduce((sum, entry) => sum + entry.solved, 0) / tried : null;
    });
  const marks = answer.visits.filter((visit) => visit.replayed).map((visit) => [visit.step, "replay"]);
  return {
    data: [steps, rates("plain"), rates("reflection")],
    marks,
    series: [
      { label: "plain", colour: "--blue", points: true },
      { label: "under reflection", colour: "--orange", points: true, hollow: true },
    ],
  };
}

function openStep(run, answer, step, go) {
  const visit = answer.visits.find((one) => one.step === step);
  if (visit) go(`${run}/group/${visit.step}/${visit.group}`);
}

function visitTable(run, visits) {
  const newest = [...visits].reverse();
  const whole = table(
    ["Step", "Prompt", "Solved", "Outcomes", "What R³ did"],
    newest.map((visit) =>
      h(
        "tr",
        { "data-row": true },
        h(
          "td.number",
          {},
          h("a", { href: `#/${run}/group/${visit.step}/${visit.group}`, "data-open": true }, `step ${visit.step}`),
        ),
        h("td", {}, visit.context),
        h("td.rates", {}, rateBar(visit.solved, visit.tried)),
        h("td.outcomes", {}, visit.summary ? dots(visit.summary) : h("span.quiet", {}, "–")),
        h("td.did", {}, visit.summary && badges(visit.summary)),
      ),
    ),
  );
  whole.querySelector("table").classList.add("visits");
  return whole;
}
