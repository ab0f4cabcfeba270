// SERR as a picture: peak against global entropy. Up and to the left is better; a sample dominates what lies below and
// to the right of it.

import { h, number } from "./dom.js";

const SCATTER_WIDTH = 460;
const SCATTER_HEIGHT = 300;
const EDGE = { left: 52, right: 14, top: 14, bottom: 38 };

export function scatter(ranking, chosen, pick) {
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

export function verdictOfRanking(ranking, chosen) {
  const point = ranking.points.find((one) => one.sample === chosen);
  const ranked = ranking.points.filter((one) => one.rank !== null);
  if (!point) return "An answer that joined is not ranked in this group.";
  if (!ranked.length)
    return "No answers were ranked in this group: not solve-none, fewer than two truncated answers, or all tied.";
  if (point.rank === null) return `Not ranked: ${ranked.length} others were.`;
  return `Sample ${chosen} dominates ${point.score} of the ${ranked.length} ranked answers (higher peak and lower global entropy): ranking reward ${number(point.reward)}.`;
}
