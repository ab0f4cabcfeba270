// What r3 probe found: shares, the lift of reflection, information in the ranking, and what is expected to pay.

import { ask, store } from "./data.js";
import { empty, fill, h, number, percent, plural, table } from "./dom.js";

export async function probePage(root, { run, parts, go }) {
  if (!store.probes.length) {
    fill(root, h("h1", {}, "Probe"), empty("No probe here", "r3 probe RECIPE --out DIR makes one; then r3 view DIR."));
    return {};
  }
  const shown = Math.min(Number(parts[0]) || 0, store.probes.length - 1);
  const probe = await ask("probe", { probe: shown });
  fill(root, probeBar(run, shown, go), probe.problem ? empty("This probe cannot be shown", probe.problem) : body(probe));
  return {};
}

const probeBar = (run, shown, go) =>
  h(
    "div.toolbar",
    {},
    h("h1", {}, "Probe"),
    store.probes.length > 1
      ? h(
          "select",
          { "aria-label": "probe", onchange: (event) => go(`${run}/probe/${event.target.value}`) },
          store.probes.map((about, i) => h("option", { value: i, selected: i === shown }, about.name)),
        )
      : h("span.quiet", { title: store.probes[0].path }, store.probes[0].name),
  );

function body(probe) {
  const { findings } = probe;
  return [
    h(
      "p.quiet",
      {},
      `${probe.recipe}: model ${probe.model}, task ${probe.task}, seed ${probe.seed}. Nothing was trained; intervals are 95 %.`,
    ),
    probeTiles(probe, findings),
    adviceCard(probe.advice),
    h(
      "div.twos",
      {},
      groupsCard(findings),
      liftCard(findings),
      orderCard(findings),
      answersCard(findings),
      followCard(probe),
    ),
  ];
}

function probeTiles({ tokens, machine }, findings) {
  const tile = (label, value, more) =>
    h("div.tile", {}, h("span", {}, label), h("b", {}, value), h("small", {}, more || "\u00a0"));
  const { lift, ranking } = findings;
  const serr = ranking.auc["SERR's order"];
  return h(
    "div.tiles",
    {},
    tile("tokens", number(tokens.generated), `of at most ${number(tokens.budget)}`),
    tile("pass@1", percent(findings.pass_at[1].value), "of plain answers"),
    tile("solve-none", percent(findings.solve.none.value), `of groups of ${findings.group_size}`),
    tile("never solved", number(findings.hard), `of ${plural(findings.queries, "query", "queries")}`),
    tile("lift of reflection", lift ? times(lift.ratio.value) : "–", lift ? `${times(1)}: none` : "not drawn"),
    tile("AUC of the ranking", serr ? number(serr.value, 2) : "–", "0.5: chance"),
    machine && tile("tokens/s", number(machine.tokens_per_second), `${number(machine.seconds)} s`),
    machine && tile("memory", `${number(machine.peak_memory_gb, 2)} GB`, "at its peak"),
  );
}

const times = (value) => (value === null ? "∞" : `${value.toFixed(1)}×`);

function adviceCard(advice) {
  return h(
    "section.card.advice",
    {},
    h("h3", {}, "Expected to pay"),
    h(
      "table",
      {},
      h(
        "tbody",
        {},
        advice.map((one) =>
          h(
            "tr",
            { "data-about": one.about },
            h("th", { scope: "row" }, one.about),
            h("td", {}, h(`span.pays.${one.pays}`, {}, one.pays)),
            h("td", {}, one.reason),
          ),
        ),
      ),
    ),
  );
}

// Estimates on one scale: a point, its interval, and what chance would be.
function intervals(rows, { most = 1, chance = null, tell = percent } = {}) {
  const at = (value) => `${(100 * Math.min(Math.max(value ?? most, 0), most)) / most}%`;
  const width = (one) => `calc(${at(one.high)} - ${at(one.low)})`;
  return h(
    "div.intervals",
    {},
    rows
      .filter(([, one]) => one)
      .map(([label, one]) =>
        h(
          "div.interval",
          {},
          h("span", {}, label),
          h(
            "div.track",
            { title: `${tell(one.value)}, 95 %: ${tell(one.low)} to ${tell(one.high)}` },
            chance !== null && h("i.chance", { style: { left: at(chance) } }),
            h("i.range", { style: { left: at(one.low), width: width(one) } }),
            h("i.point", { style: { left: at(one.value) } }),
          ),
          h("span", {}, h("b", {}, tell(one.value)), h("small", {}, `${tell(one.low)} … ${tell(one.high)}`)),
        ),
      ),
  );
}

function groupsCard({ solve, pass_at: passed, replay, truncated, group_size: size, queries }) {
  return h(
    "section.card",
    {},
    h("h3", {}, "Groups", h("span.note", {}, `of ${size} answers to ${plural(queries, "training query", "training queries")}`)),
    intervals([
      ["solve none", solve.none],
      ["mixed", solve.mixed],
      ["solve all", solve.all],
      ...Object.entries(passed).map(([k, one]) => [`pass@${k}`, one]),
      ["truncated", truncated],
    ]),
    h("h4", {}, "With something to replay, met again"),
    intervals([
      ["solve none, a success", replay.success],
      ["solve all, a failure", replay.failure],
    ]),
  );
}

function liftCard({ lift, hard, queries, refused }) {
  const title = h("h3", {}, "Lift of reflection", h("span.note", {}, `${number(hard)} of ${number(queries)} never solved`));
  const reasons = Object.entries(refused).map(([why, count]) => `${why.replaceAll("_", " ")}: ${number(count)}`);
  if (!lift) return h("section.card", {}, title, h("p.quiet", {}, "No reflection answers were drawn. ", reasons.join(", ")));
  const most = Math.max(lift.plain.high, lift.reflection.high, 0.01);
  const side = (name, i) => [name, `${number(lift.right[i])} of ${number(lift.answers)}`, number(lift.tokens_per_right[i])];
  const { value, low, high } = lift.ratio;
  return h(
    "section.card.lift",
    {},
    title,
    intervals(
      [
        ["plain", lift.plain],
        ["after a shown failure", lift.reflection],
      ],
      { most },
    ),
    h("p", {}, "Right ", h("b", {}, times(value)), ` as often after a shown failure (${times(low)} … ${times(high)}).`),
    table(
      ["Answers to them", "Right", "Tokens per right answer"],
      [side("plain", 0), side("after a shown failure", 1)].map((cells) =>
        h(
          "tr",
          {},
          cells.map((cell) => h("td", {}, cell)),
        ),
      ),
    ),
    reasons.length > 0 && h("p.quiet", {}, `No reflection prompt: ${reasons.join(", ")}`),
  );
}

const twoDigits = (value) => (value === null ? "–" : value.toFixed(2));

function orderCard({ ranking, at_twice: twice, limit }) {
  const rows = Object.entries(ranking.auc);
  if (ranking.at_half) rows.push(["SERR's order at half the limit", ranking.at_half]);
  return h(
    "section.card",
    {},
    h("h3", {}, "Information in the ranking", h("span.note", {}, "AUC for finishing right; 0.5: chance")),
    rows.length
      ? intervals(rows, { chance: 0.5, tell: twoDigits })
      : h("p.quiet", {}, "No query has both a truncated answer that finishes right and one that does not."),
    h(
      "p.quiet",
      {},
      `${number(twice.carried_on)} truncated answers were carried on to ${number(2 * limit)} tokens; `,
      `${plural(ranking.pairs, "pair")} of ${plural(ranking.queries, "query", "queries")}, at half the limit `,
      `${plural(ranking.pairs_at_half, "pair")} of ${plural(ranking.queries_at_half, "query", "queries")}.`,
      twice.no_room ? ` For ${number(twice.no_room)} the context had no room.` : "",
    ),
    twice.finish_right && h("h4", {}, "At twice the limit"),
    twice.finish_right && intervals([["truncated answers right", twice.finish_right]]),
    twice.accuracy !== null && h("p.quiet", {}, `All plain answers together: ${percent(twice.accuracy)} right.`),
  );
}

function answersCard({ lengths, reasons, limit }) {
  const all = Object.values(reasons).reduce((sum, count) => sum + count, 0);
  return h(
    "section.card",
    {},
    h("h3", {}, "Plain answers", h("span.note", {}, `${number(all)}, of at most ${number(limit)} tokens`)),
    h(
      "p",
      {},
      `Mean length ${number(lengths.mean, 1)}, median ${number(lengths.median, 1)}`,
      lengths.mean_right === null ? "." : `; of right ones ${number(lengths.mean_right, 1)}.`,
    ),
    table(
      ["The verifier said", "Answers", "Share"],
      Object.entries(reasons).map(([reason, count]) =>
        h("tr", {}, h("td", {}, reason), h("td.number", {}, number(count)), h("td.number", {}, percent(count / all))),
      ),
    ),
  );
}

const followCard = ({ settings, recipe_file: recipe }) =>
  h(
    "section.card.follow",
    {},
    h("h3", {}, "Advised settings"),
    recipe && h("p", {}, h("code", {}, `r3 train ${recipe}`)),
    h("pre", {}, settings),
  );
