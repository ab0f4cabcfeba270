// Metrics of the runs as columns, kept up to date, and what the charts do to them.

import { ask } from "./api.js";

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
