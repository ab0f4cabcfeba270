// One group and one of its samples in full: answers side by side, coloured tokens, ranking and reflection.

import { ask } from "./data.js";
import {
  aged, badges, dot, empty, fill, h, joins, number, outcomeOf, plural, signed, SOURCES, story, whence,
} from "./dom.js";
import { diffView, heatMap } from "./sample.js";

// Characters of the reference answer in a summary (r3.train.record).
const KEPT_OF_ANSWER = 240;

export async function groupPage(root, { run, parts, go }) {
  const [step, number_, sample] = parts.map(Number);
  const group = await ask("group", { run, step, group: number_ });
  const to = (index) => `${run}/group/${step}/${number_}/${index}`;
  const chosen = parts.length > 2 ? sample : 0;
  fill(root, heading(run, step, group), h("p.story", {}, story(group.summary)));
  const move = (by) => {
    const next = number_ + by;
    if (next >= 0 && next < group.groups) go(`${run}/group/${step}/${next}`);
  };
  if (!group.kept) {
    root.append(
      h(
        "div.detail",
        {},
        promptBox(group),
        referenceCard(group),
        empty(
          "Only a summary was saved",
          "The answers of this group were not kept: ",
          h("code", {}, "run.rollouts_groups"),
          " says of how many groups per step they are.",
        ),
      ),
    );
    return { move };
  }
  const detail = h("div.detail");
  const list = h(
    "ol.samples",
    { start: 0 },
    group.samples.map((one, index) => sampleEntry(one, index, index === chosen, group, to(index))),
  );
  root.append(h("div.split", {}, h("div.side", {}, list), detail));
  await showSample(detail, run, step, group, chosen, (index) => go(to(index)));
  const moveRow = (by) => {
    const next = chosen + by;
    if (next >= 0 && next < group.samples.length) go(to(next));
  };
  return { move, moveRow };
}

function heading(run, step, group) {
  const { summary } = group;
  const link = (text, href) => h("a", { href: `#/${run}/${href}` }, text);
  return h(
    "div.toolbar.head",
    {},
    h("h1", {}, link(`Step ${step}`, `steps/${step}`), ` · group ${group.group}`),
    h("span", {}, "query ", link(summary.query, `query/${encodeURIComponent(summary.query)}`)),
    badges(summary),
  );
}

const joinOf = (group, index) => joins(group.summary)[index - group.summary.fresh];

function sampleEntry(one, index, chosen, group, to) {
  const replayed = one.origin !== "fresh";
  const word = outcomeOf(one.outcome, one.finish === "length");
  return h(
    `li${chosen ? ".chosen" : ""}`,
    {},
    h(
      "a",
      { href: `#/${to}`, "aria-current": chosen ? "true" : null },
      h(
        "span.top",
        {},
        dot(word, { replayed }),
        h("b", {}, `sample ${index}`),
        h("span", {}, word),
        replayed && h("span.badge.replay", {}, aged(joinOf(group, index))),
        h("span.worth", {}, signed(one.advantage)),
      ),
      h("span.preview", {}, one.preview || "(empty)"),
    ),
  );
}

const promptBox = (group) =>
  h("details.card.prompt", { open: group.prompt.length < 600 }, h("summary", {}, "Prompt"), h("pre", {}, group.prompt));

// The reference answer, as far as the summary keeps it.
const referenceCard = ({ summary: { answer } }) =>
  answer &&
  h(
    "section.card.reference",
    {},
    h("h3", {}, "Reference answer"),
    h("pre", {}, answer.length < KEPT_OF_ANSWER ? answer : `${answer}…`),
  );

async function showSample(detail, run, step, group, index, pick) {
  const one = await ask("sample", { run, step, group: group.group, sample: index });
  fill(
    detail,
    promptBox(group),
    referenceCard(group),
    factRow(group, one, index),
    h(
      "section.card",
      {},
      h("h3", {}, "Response", h("span.note", {}, plural(one.tokens.length, "token"))),
      heatMap(one),
    ),
    group.attempt && reflectionCard(run, group, one),
    group.ranking && rankingCard(group, index, pick),
  );
}

function factRow(group, one, index) {
  const word = outcomeOf(one.outcome, one.finish === "length");
  const replayed = one.origin !== "fresh";
  const age = one.origin === "replayed" ? joinOf(group, index).age : null;
  const parts = Object.entries(one.reward_parts)
    .map(([name, value]) => `${name} ${number(value)}`)
    .join(" + ");
  const fact = (name, ...value) => h("div", {}, h("dt", {}, name), h("dd", {}, ...value));
  return h(
    "dl.card.factrow",
    {},
    fact("sample", `${index} of ${group.samples.length}`, one.id === null ? "" : ` (#${one.id})`),
    fact("verdict", dot(word, { replayed }), ` ${word}`),
    fact("reason", one.verdict || "–"),
    fact("reward", `${number(one.reward)}`, parts && h("small", {}, parts)),
    fact("advantage", signed(one.advantage)),
    fact(
      "drawn",
      SOURCES[one.origin] || whence(one.step),
      one.origin !== "demonstration" && h(
        "small",
        {},
        `${age === null ? "" : `${plural(age, "update")} before this one, `}under the ${one.drawn_in} prompt`,
      ),
    ),
  );
}

// Open if something was ranked; otherwise the entropies are a click away.
function rankingCard(group, index, pick) {
  const { peak_fraction: share, points } = group.ranking;
  return h(
    "details.card.ranking",
    { open: points.some((one) => one.rank !== null) },
    h("summary", {}, "Ranking", h("span.note", {}, `peak: the ${Math.round(100 * share)} % most undecided tokens`)),
    h("p", {}, verdictOfRanking(group.ranking, index)),
    scatter(group.ranking, index, pick),
  );
}

function reflectionCard(run, group, one) {
  const { attempt } = group;
  const from =
    attempt.step === null
      ? null
      : h("a", { href: `#/${run}/query/${encodeURIComponent(group.summary.query)}` }, `step ${attempt.step}`);
  const title = h(
    "h3",
    {},
    "Reflection",
    h(
      "span.note",
      {},
      `the prompt shows attempt #${attempt.id}`,
      from && " of ",
      from,
      attempt.verdict && `, judged “${attempt.verdict}”`,
    ),
  );
  if (attempt.response === null)
    return h("section.card", {}, title, h("p.quiet", {}, "Its text was not saved with this group."));
  return h(
    "section.card",
    {},
    title,
    h(
      "div.two",
      {},
      h("div", {}, h("h4", {}, "Attempt shown"), h("pre", {}, attempt.response)),
      h(
        "div",
        {},
        h("h4", {}, "Against this answer ", h("span.note", {}, h("del", {}, "gone"), " ", h("ins", {}, "new"))),
        diffView(attempt.response, one.response),
      ),
    ),
  );
}

// SERR as a picture: peak against global entropy. Up and to the left is better; a sample dominates what lies below and
// to the right of it.

const SCATTER_WIDTH = 460;
const SCATTER_HEIGHT = 300;
const EDGE = { left: 52, right: 14, top: 14, bottom: 38 };

function scatter(ranking, chosen, pick) {
  const { points, beats } = ranking;
  const x = scaleOf(
    points.map((one) => one.global),
    EDGE.left,
    SCATTER_WIDTH - EDGE.right,
  );
  const y = scaleOf(
    points.map((one) => one.peak),
    SCATTER_HEIGHT - EDGE.bottom,
    EDGE.top,
  );
  const at = new Map(points.map((one) => [one.sample, [x(one.global), y(one.peak)]]));
  const here = at.get(chosen);
  const ranked = points.find((one) => one.sample === chosen && one.rank !== null);
  const line = ([i, j]) => {
    const [[x1, y1], [x2, y2]] = [at.get(i), at.get(j)];
    return h(`line.beats${i === chosen ? ".mine" : ""}`, { x1, y1, x2, y2 });
  };
  return h(
    "svg.scatter",
    {
      viewBox: `0 0 ${SCATTER_WIDTH} ${SCATTER_HEIGHT}`,
      role: "img",
      "aria-label": "peak against global entropy of the group's answers",
    },
    axes(x, y),
    ranked &&
      h("rect.dominated", {
        x: here[0],
        y: here[1],
        width: SCATTER_WIDTH - EDGE.right - here[0],
        height: SCATTER_HEIGHT - EDGE.bottom - here[1],
      }),
    beats.filter(([i, j]) => i === chosen || j === chosen).map(line),
    points.map((one) => mark(one, at.get(one.sample), one.sample === chosen, pick)),
  );
}

function mark(one, [cx, cy], chosen, pick) {
  const ranked = one.rank !== null;
  const told = `sample ${one.sample}: peak ${number(one.peak)}, global ${number(one.global)}${ranked ? `, dominates ${one.score}, reward ${number(one.reward)}` : ", not ranked"}`;
  return h(
    `g.point${ranked ? ".ranked" : ""}${chosen ? ".chosen" : ""}`,
    { onclick: () => pick(one.sample) },
    h("title", {}, told),
    h("circle", { cx, cy, r: ranked ? 9 : 5 }),
    ranked && h("text", { x: cx, y: cy + 3.5 }, one.sample),
  );
}

function scaleOf(values, from, to) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const room = (high - low || Math.abs(high) || 1) * 0.12;
  const [a, b] = [low - room, high + room];
  const place = (value) => from + ((value - a) / (b - a)) * (to - from);
  place.ticks = [0, 1, 2, 3].map((i) => a + ((b - a) * (i + 0.5)) / 4);
  return place;
}

function axes(x, y) {
  const [bottom, left, right] = [SCATTER_HEIGHT - EDGE.bottom, EDGE.left, SCATTER_WIDTH - EDGE.right];
  return h(
    "g.axes",
    {},
    x.ticks.map((tick) => [
      h("line", { x1: x(tick), x2: x(tick), y1: EDGE.top, y2: bottom }),
      h("text.x", { x: x(tick), y: bottom + 14 }, number(tick)),
    ]),
    y.ticks.map((tick) => [
      h("line", { x1: left, x2: right, y1: y(tick), y2: y(tick) }),
      h("text.y", { x: left - 6, y: y(tick) + 4 }, number(tick)),
    ]),
    h("text.x.label", { x: (left + right) / 2, y: SCATTER_HEIGHT - 5 }, "global entropy, lower is steadier"),
    h(
      "text.x.label",
      { x: 0, y: 0, transform: `translate(11 ${SCATTER_HEIGHT / 2 - 10}) rotate(-90)` },
      "peak entropy",
    ),
  );
}

function verdictOfRanking(ranking, chosen) {
  const point = ranking.points.find((one) => one.sample === chosen);
  const ranked = ranking.points.filter((one) => one.rank !== null);
  if (!point) return "An answer that joined is not ranked in this group.";
  if (!ranked.length)
    return "No answers were ranked in this group: not solve-none, fewer than two truncated answers, or all tied.";
  if (point.rank === null) return `Not ranked: ${ranked.length} others were.`;
  return `Sample ${chosen} dominates ${point.score} of the ${ranked.length} ranked answers (higher peak and lower global entropy): ranking reward ${number(point.reward)}.`;
}
