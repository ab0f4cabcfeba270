// What the page knows: answers about the runs, their metrics as columns, and what the charts draw of them.

import { percent } from "./dom.js";

// Answers about the runs: from the server, or in an exported file from the answers stored in it.

const stored = document.getElementById("r3-answers");
const answers = stored ? JSON.parse(stored.textContent) : null;

export const exported = answers !== null;

export class Refused extends Error {}

const addressOf = (name, parameters) =>
  `${name}?${Object.keys(parameters)
    .sort()
    .map((key) => `${key}=${encodeURIComponent(parameters[key])}`)
    .join("&")}`;

export async function ask(name, parameters = {}) {
  const address = addressOf(name, parameters);
  if (exported) return fromExport(name, parameters, address);
  let reply;
  try {
    reply = await fetch(`/api/${address}`);
  } catch {
    throw new Refused("r3 view does not answer: it was stopped. Start it again and reload this page.");
  }
  const body = await reply.json().catch(() => ({ error: `the server answered ${reply.status}` }));
  if (!reply.ok) throw new Refused(body.error);
  return body;
}

function fromExport(name, parameters, address) {
  if (address in answers) return answers[address];
  if (name === "search") return searchExport(parameters);
  if (name === "queries") return listExport(parameters);
  throw new Refused("This is not in the exported report: open the run itself with r3 view, or export more steps.");
}

function searchExport({ run, step, text }) {
  const wanted = text.toLowerCase();
  const groups = answers[addressOf("step", { run, step })].groups;
  const holds = (value) =>
    String(value || "")
      .toLowerCase()
      .includes(wanted);
  return {
    groups: groups
      .map((_, group) => group)
      .filter((group) => {
        const full = answers[addressOf("group", { run, step, group })];
        return (
          holds(groups[group].query) ||
          holds(groups[group].question) ||
          (full && (holds(full.prompt) || full.samples.some((sample) => holds(sample.preview))))
        );
      }),
  };
}

function listExport({ run, search, order }) {
  const known = answers[addressOf("queries", { run, search: "", order: "hardest" })];
  const rate = (query) => (query.tried ? query.solved / query.tried : 0);
  const orders = {
    hardest: (a, b) => rate(a) - rate(b),
    easiest: (a, b) => rate(b) - rate(a),
    newest: (a, b) => b.last - a.last,
    replayed: (a, b) => b.replays - a.replays,
  };
  const queries = known.queries
    .filter((query) => `${query.query}\n${query.question}`.toLowerCase().includes((search || "").toLowerCase()))
    .sort(orders[order] || orders.hardest);
  return { ...known, queries, matching: search ? queries.length : known.matching };
}

// Metrics of the runs as columns, kept up to date, and what the charts do to them.

// Per run: { generation, steps, columns }. Charts read it, `follow` extends it.
export const store = { runs: [], about: [], state: [], probes: [], version: "" };

export async function load() {
  const { runs, probes, version } = await ask("runs");
  store.about = runs;
  store.probes = probes;
  store.version = version;
  store.runs = runs.map(() => ({ generation: 0, steps: [], columns: {} }));
  await Promise.all([refreshState(), ...runs.map((_, run) => follow(run))]);
}

export async function refreshState() {
  store.state = (await ask("state")).runs;
}

// Fetch what was added to a run's metrics; true if anything was.
export async function follow(run) {
  const known = store.runs[run];
  const parameters = known.steps.length ? { run, since: known.steps.length, generation: known.generation } : { run };
  const news = await ask("metrics", parameters);
  if (news.from === 0) {
    const changed = news.generation !== known.generation || news.steps.length !== known.steps.length;
    store.runs[run] = { generation: news.generation, steps: news.steps, columns: news.columns };
    return changed;
  }
  if (news.from !== known.steps.length) return false;
  const before = known.steps.length;
  known.steps.push(...news.steps);
  for (const [key, values] of Object.entries(news.columns)) {
    if (!(key in known.columns)) known.columns[key] = new Array(before).fill(null);
    known.columns[key].push(...values);
  }
  return news.steps.length > 0;
}

export const column = (run, key) => store.runs[run].columns[key] || [];
export function latest(run, key) {
  const values = column(run, key);
  for (let i = values.length - 1; i >= 0; i -= 1) if (values[i] !== null) return values[i];
  return null;
}

// Exponential smoothing without a start-up bias; gaps stay gaps.
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let seen = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    mean = weight * mean + (1 - weight) * value;
    seen = weight * seen + (1 - weight);
    return mean / seen;
  });
}

// Where an epoch begins: [[step, epoch]], from the second on.
export function epochs(run) {
  const found = [];
  const { steps } = store.runs[run];
  column(run, "epoch").forEach((epoch, i, all) => {
    if (i > 0 && epoch !== null && all[i - 1] !== null && epoch > all[i - 1]) found.push([steps[i], epoch]);
  });
  return found;
}

// All runs on one axis of steps, for uPlot: [steps, column, column, …], null where a run has no such step.
export function aligned(parts) {
  const steps = [...new Set(parts.flatMap((part) => part.steps))].sort((a, b) => a - b);
  const places = new Map(steps.map((step, i) => [step, i]));
  return [
    steps,
    ...parts.map((part) => {
      const values = new Array(steps.length).fill(null);
      part.steps.forEach((step, i) => {
        values[places.get(step)] = part.values[i] ?? null;
      });
      return values;
    }),
  ];
}

// What the overview draws: which metrics make which chart.

// A chart of lines: `parts` for one run, `main` (the first part) for comparing several.
export const LINES = [
  {
    title: "Accuracy",
    note: "as sampled; dots: held-out",
    format: percent,
    parts: [
      ["accuracy", "plain"],
      ["accuracy/reflection", "under reflection"],
      ["heldout/accuracy", "held-out", "points"],
    ],
  },
  {
    title: "Reward",
    note: "mean, and its parts",
    parts: [
      ["reward", "reward"],
      ["reward/correct", "correct"],
      ["reward/length", "length"],
      ["reward/ranking", "ranking"],
    ],
  },
  {
    title: "What R³ did",
    note: "per step",
    parts: [
      ["replay/samples", "replayed answers"],
      ["groups/reflection", "reflection groups"],
      ["ranking/samples", "ranked answers"],
    ],
  },
  {
    title: "Groups that taught",
    note: "some advantage is not 0",
    parts: [
      ["groups/teaching", "taught"],
      ["groups", "all groups"],
    ],
  },
  { title: "Truncated", note: "share of answers", format: percent, parts: [["truncated", "truncated"]] },
  {
    title: "Entropy",
    note: "of the policy, nats per token",
    parts: [
      ["entropy", "when sampled"],
      ["update/entropy", "when trained"],
    ],
  },
  {
    title: "Length",
    note: "tokens",
    parts: [
      ["length/mean", "mean"],
      ["length/max", "longest"],
    ],
  },
  {
    title: "Age of replayed answers",
    note: "updates",
    parts: [
      ["replay/age_mean", "mean"],
      ["replay/age_max", "oldest"],
    ],
  },
  {
    title: "Effective sample size",
    note: "1: on-policy",
    parts: [
      ["update/ess/fresh", "fresh"],
      ["update/ess/replayed", "replayed"],
      ["update/ess/reflection", "reflection"],
    ],
  },
  { title: "Loss", note: "of the update", parts: [["update/loss", "loss"]] },
  { title: "Gradient norm", note: "before clipping", parts: [["update/grad_norm", "gradient norm"]] },
  {
    title: "Clipped tokens",
    note: "share",
    format: percent,
    parts: [
      ["update/clip_share/fresh", "fresh"],
      ["update/clip_share/replayed", "replayed"],
      ["update/clip_share/reflection", "reflection"],
    ],
  },
  {
    title: "KL",
    note: "to the policy that sampled",
    parts: [
      ["update/kl/fresh", "fresh"],
      ["update/kl/replayed", "replayed"],
      ["update/kl/reflection", "reflection"],
    ],
  },
  { title: "Learning rate", parts: [["update/learning_rate", "learning rate"]] },
  { title: "Tokens per second", parts: [["tokens_per_second", "generated"]] },
];

const SHARE_OF_RIGHT = [
  ["accuracy/reflection", "after a shown failure"],
  ["lift/plain", "plain, same queries"],
];
// A step has few pairs of answers whose order could be wrong: sums over several steps say more.
const PAIRS_OVER = 32;

// How many hard queries of a step; a count of 0 is not in the metrics.
function asked(name) {
  return (columns) =>
    (columns[`reflection/${name}`] || []).map((count, i) => (columns["replay/samples"][i] === null ? null : (count ?? 0)));
}

// What each mechanism brings for its cost; drawn only if there are values.
const YIELDS = [
  { title: "Lift of reflection", note: "share of right answers", format: percent, parts: SHARE_OF_RIGHT },
  {
    title: "Right answers per 1,000 tokens",
    note: "same queries",
    parts: [
      ["lift/right_per_1k_tokens/reflection", "after a shown failure"],
      ["lift/right_per_1k_tokens/plain", "plain"],
    ],
  },
  {
    title: "Reflection on hard queries",
    note: "asked, or why not",
    parts: [
      [asked("built"), "asked"],
      [asked("paused"), "paused: no lift"],
      [asked("no_share"), "over its share"],
      [asked("given_up"), "given up"],
      [asked("no_failure"), "no failure to show"],
      [asked("too_long"), "too long"],
      [asked("no_room"), "no room"],
    ],
  },
  {
    title: "Where replayed answers come from",
    parts: [
      ["replay/samples", "all replayed"],
      ["replay/cross_context", "found in reflection"],
      ["replay/at_once", "found in the same step"],
    ],
  },
  {
    title: "AUC of the ranking",
    note: `over ${PAIRS_OVER} steps; 0.5: chance`,
    range: () => [0, 1],
    parts: [[rankingAuc, "SERR's order at half the limit"]],
  },
];

function rankingAuc(columns) {
  const pairs = columns["ranking/pairs"] || [];
  const inOrder = columns["ranking/pairs_in_order"] || [];
  let [known, right] = [0, 0];
  return pairs.map((count, i) => {
    known += (count || 0) - (pairs[i - PAIRS_OVER] || 0);
    right += (inOrder[i] || 0) - (inOrder[i - PAIRS_OVER] || 0);
    return known > 0 && count !== null ? right / known : null;
  });
}

// The charts of yields that some run has values for: those above, and one for each family of metrics below yield/
// (yield/NAME/… in one chart, a line for each).
export function yieldLines(runs) {
  const acts = ([key]) =>
    runs.some((columns) =>
      typeof key === "function" ? key(columns).some((value) => value !== null) : (columns[key] || []).some(Boolean),
    );
  const names = [...new Set(runs.flatMap(Object.keys))].filter((name) => name.startsWith("yield/")).sort();
  const families = new Map();
  for (const name of names) {
    const family = name.split("/")[1];
    families.set(family, [...(families.get(family) || []), name]);
  }
  const plainly = (text) => text.replaceAll("/", ", ").replaceAll("_", " ");
  const others = [...families].map(([family, keys]) => ({
    title: `Yield: ${plainly(family)}`,
    parts: keys.map((key) => [key, plainly(key.split("/").slice(2).join("/") || family)]),
  }));
  return [...YIELDS, ...others].filter((spec) => spec.parts.some(acts));
}
