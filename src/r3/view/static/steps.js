// A step's groups, one per row: what was asked, how it went, what R³ did, what each sample was worth.

import { ask } from "./data.js";
import { button, choice, empty, fill, h, number, searchField, table } from "./dom.js";
import { advantageBars, badges, dots, isHelped, rankedCount, replays, solveKind, teaches } from "./marks.js";
import { questionLine } from "./queries.js";

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
