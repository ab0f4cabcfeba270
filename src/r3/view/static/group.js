// One group and one of its samples in full: answers side by side, coloured tokens, ranking and reflection.

import { ask } from "./api.js";
import { diffView } from "./diff.js";
import { empty, fill, h, number, plural, signed } from "./dom.js";
import { heatMap } from "./heat.js";
import { SOURCES, aged, badges, dot, joins, outcomeOf, story, whence } from "./marks.js";
import { scatter, verdictOfRanking } from "./ranking.js";

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
