// What the overview draws: which metrics make which chart.

import { percent } from "./dom.js";

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
