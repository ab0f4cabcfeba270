// A step's groups, all queries with their success rates, and one query through time.

import { Chart } from "./charts.js";
import { ask } from "./data.js";
import {
  advantageBars, badges, button, choice, dots, empty, fill, h, isHelped, number, percent, plural, rankedCount,
  replays, searchField, solveKind, table, teaches,
} from "./dom.js";

// A step's groups, one per row: what was asked, how it went, what R³ did, what each sample was worth.

const PAGE = 60;
const filter = { kind: "all", text: "" };
const KINDS_OF_GROUP = [
  ["all", "All", "every group"],
  ["solve-none", "Solve-none", "every fresh answer wrong"],
  ["mixed", "Mixed", "some right, some wrong"],
  ["solve-all", "Solve-all", "every fresh answer right"],
  ["truncated", "Truncated", "an answer was cut by the length limit"],
  ["replayed", "Replayed", "past answers joined"],
  ["reflection", "Reflection", "asked with a past failure shown"],
  ["helped", "Helped", "a hint, a critique or a demonstration"],
  ["ranked", "Ranked", "the ranking reward ordered answers"],
  ["nothing", "Taught nothing", "every advantage is 0"],
];
const TESTS = {
  all: () => true,
  truncated: (group) => group.truncated.slice(0, group.fresh).some(Boolean),
  replayed: (group) => replays(group).length > 0,
  reflection: (group) => group.context === "reflection",
  helped: isHelped,
  ranked: (group) => rankedCount(group) > 0,
  nothing: (group) => !teaches(group),
};

export async function stepsPage(root, { run, parts, go }) {
  const { steps } = await ask("steps", { run });
  if (!steps.length) {
    fill(
      root,
      empty(
        "No saved rollouts",
        "This run kept none so far. ",
        h("code", {}, "run.rollouts_every"),
        " sets how often they are saved.",
      ),
    );
    return {
      update: (state) => {
        if (state.saved[0]) go(`${run}/steps`, true);
      },
    };
  }
  const following = !parts[0];
  const step = following ? steps[steps.length - 1] : Number(parts[0]);
  const answer = await ask("step", { run, step });
  const place = h("div");
  let matches = null;
  const redraw = () => fill(place, groupTable(run, step, answer, matches));
  const search = async () => {
    matches = filter.text ? new Set((await ask("search", { run, step, text: filter.text })).groups) : null;
    redraw();
  };
  fill(root, stepBar(run, step, steps, following, go), filterBar(answer, search, redraw), place);
  if (filter.text) await search();
  else redraw();
  const update = (state) => {
    if (following && state.saved[2] !== step) go(`${run}/steps`, true);
  };
  const move = (by) => {
    const next = steps[nearest(steps, step) + by];
    if (next !== undefined) go(`${run}/steps/${next}`);
  };
  return { update, move };
}

const nearest = (steps, step) => {
  const at = steps.findIndex((one) => one >= step);
  return at < 0 ? steps.length - 1 : at;
};

function stepBar(run, step, steps, following, go) {
  const at = nearest(steps, step);
  const to = (index) => () => go(`${run}/steps/${steps[index]}`);
  const input = h("input", {
    type: "number",
    value: step,
    min: steps[0],
    max: steps[steps.length - 1],
    "aria-label": "step",
    onchange: (event) => go(`${run}/steps/${steps[nearest(steps, Number(event.target.value))]}`),
  });
  const slider = h("input.wide", {
    type: "range",
    min: 0,
    max: steps.length - 1,
    value: at,
    "aria-label": "step, of those saved",
    oninput: (event) => {
      input.value = steps[Number(event.target.value)];
    },
    onchange: (event) => go(`${run}/steps/${steps[Number(event.target.value)]}`),
  });
  return h(
    "div.toolbar",
    {},
    h("h1", {}, "Step"),
    button("‹", to(at - 1), { disabled: at <= 0, "aria-label": "earlier step" }),
    input,
    button("›", to(at + 1), { disabled: at >= steps.length - 1, "aria-label": "later step" }),
    slider,
    button("Newest", () => go(`${run}/steps`), { "aria-pressed": String(following), title: "follow the run" }),
    h("span.quiet", {}, `${number(steps.length)} saved`),
  );
}

function filterBar(answer, search, redraw) {
  const count = (kind) => answer.groups.filter((group) => matchesKind(group, kind)).length;
  const kinds = h("div");
  const drawKinds = () =>
    fill(
      kinds,
      choice(
        "groups",
        KINDS_OF_GROUP.map(([value, text, title]) => [value, `${text} ${count(value)}`, title]),
        filter.kind,
        (value) => {
          filter.kind = value;
          drawKinds();
          redraw();
        },
      ),
    );
  drawKinds();
  const field = searchField("Search query id, prompt, response", filter.text, (text) => {
    filter.text = text;
    search();
  });
  return h("div.toolbar", {}, kinds, field);
}

const matchesKind = (group, kind) => (TESTS[kind] ? TESTS[kind](group) : solveKind(group) === kind);

function groupTable(run, step, answer, matches) {
  const chosen = answer.groups
    .map((group, index) => ({ group, index }))
    .filter(({ group, index }) => matchesKind(group, filter.kind) && (matches === null || matches.has(index)));
  if (!chosen.length) return empty("No such group", "No group of this step matches the filter.");
  const body = h("tbody");
  const more = h("div.more");
  let drawn = 0;
  const draw = () => {
    body.append(...chosen.slice(drawn, drawn + PAGE).map(({ group, index }) => groupRow(run, step, group, index)));
    drawn = Math.min(drawn + PAGE, chosen.length);
    fill(
      more,
      drawn < chosen.length &&
        button(`Show ${number(Math.min(PAGE, chosen.length - drawn))} more of ${number(chosen.length - drawn)}`, draw),
    );
  };
  draw();
  const whole = table(["#", "Query", "Outcomes", "What R³ did", "Advantages"], []);
  whole.querySelector("tbody").replaceWith(body);
  whole.querySelector("table").classList.add("groups");
  return h("div", {}, whole, more);
}

function groupRow(run, step, group, index) {
  return h(
    "tr",
    { "data-row": true },
    h("td.number", {}, index),
    h(
      "td.question",
      {},
      h("a", { href: `#/${run}/group/${step}/${index}`, "data-open": true }, group.query),
      questionLine(group),
    ),
    h("td.outcomes", {}, dots(group)),
    h("td.did", {}, badges(group)),
    h("td.advantages", {}, advantageBars(group.advantages, group.fresh)),
  );
}

// All queries with their success rates, and one query through time.

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
