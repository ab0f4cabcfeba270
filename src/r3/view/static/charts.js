// Charts over steps, drawn by uPlot, with one cursor and one zoom for all of them.

import { colour, fill, h, number } from "./dom.js";

/* global uPlot */
const HEIGHT = 180;
const living = new Set();
let zoom = null;

export const isZoomed = () => zoom !== null;

export function zoomTo(range) {
  zoom = range;
  for (const chart of living) chart.applyZoom();
}

export function forgetCharts() {
  for (const chart of [...living]) chart.destroy();
}

export function repaint() {
  for (const chart of living) chart.rebuild();
}

// Move the shared cursor by whole steps. Returns its new step.
export function moveCursor(by) {
  const first = [...living].find((chart) => chart.plot);
  if (!first) return null;
  const { plot } = first;
  const steps = plot.data[0];
  const at = Math.min(Math.max((plot.cursor.idx ?? (by > 0 ? -1 : steps.length)) + by, 0), steps.length - 1);
  for (const chart of living) if (chart.plot) chart.pointAt(steps[at]);
  return steps[at];
}

export function cursorStep() {
  const found = [...living].find((chart) => chart.plot && chart.plot.cursor.idx !== null);
  return found ? found.plot.data[0][found.plot.cursor.idx] : null;
}

// A chart in a card. `read()` gives { data, series, marks }; series: { label, colour, dash, width, points, bars, quiet }.
export class Chart {
  constructor({ title, note, read, format = number, stacked = false, range = null, open = null, height = HEIGHT }) {
    Object.assign(this, { title, read, format, stacked, range, open, height });
    this.legend = h("div.legend");
    this.at = h("span.at");
    this.place = h("div.plot", { style: { height: `${height}px` } });
    this.none = h("div.none", { hidden: true }, "nothing to draw yet");
    this.element = h(
      "section.card.chart",
      { "aria-label": title },
      h("h3", {}, title, note && h("span.note", {}, note), this.at),
      this.legend,
      this.place,
    );
    this.place.append(this.none);
    this.plot = null;
    this.shape = "";
    this.resizer = new ResizeObserver(() => this.resize());
    this.resizer.observe(this.place);
    living.add(this);
  }

  update() {
    const found = this.read();
    this.marks = found.marks || [];
    const drawn = this.stacked ? { ...found, data: stack(found.data) } : found;
    const shape = JSON.stringify(found.series.map(({ label, dash, quiet }) => [label, dash, quiet]));
    this.raw = found.data;
    this.none.hidden = found.data[0].length > 0 && found.series.length > 0;
    if (!this.plot || shape !== this.shape) {
      this.shape = shape;
      this.drawn = drawn;
      this.build();
    } else {
      this.plot.setData(drawn.data, zoom === null);
      if (zoom) this.applyZoom();
    }
    this.tell(this.plot ? this.plot.cursor.idx : null);
  }

  rebuild() {
    if (!this.plot) return;
    const found = this.read();
    this.drawn = this.stacked ? { ...found, data: stack(found.data) } : found;
    this.raw = found.data;
    this.build();
  }

  build() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    const { data, series } = this.drawn;
    this.buildLegend(series);
    if (!this.place.clientWidth) return; // not on the page yet: the resizer calls again
    const axis = {
      stroke: colour("--ink-2"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const options = {
      width: this.place.clientWidth,
      height: this.height,
      legend: { show: false },
      padding: [16, 8, 0, 0],
      cursor: {
        sync: {
          key: "r3",
          filters: { pub: (kind) => !kind.startsWith("mouse") || kind === "mousemove" || kind === "mouseleave" },
        },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
        bind: { dblclick: () => null },
      },
      scales: { x: { time: false }, y: { range: this.range || yRange(this.stacked) } },
      axes: [
        {
          ...axis,
          size: 26,
          space: 60,
          values: (_, ticks) => ticks.map((x) => (Number.isInteger(x) ? number(x) : "")),
        },
        { ...axis, size: 52, space: 28, values: (_, ticks) => ticks.map((y) => short(this.format, y)) },
      ],
      series: [{}, ...series.map((one, i) => this.line(one, i))],
      hooks: {
        draw: [(plot) => drawMarks(plot, this.marks)],
        setCursor: [(plot) => this.tell(plot.cursor.idx)],
        setSelect: [(plot) => this.selected(plot)],
      },
    };
    this.plot = new uPlot(options, data, this.place);
    this.plot.over.addEventListener("click", () => this.clicked());
    if (zoom) this.applyZoom();
  }

  line(one, index) {
    const stroke = one.colour.startsWith("--") ? colour(one.colour) : one.colour;
    const line = {
      label: one.label,
      stroke,
      width: one.width || 1.75,
      dash: one.dash,
      spanGaps: Boolean(one.points),
      points: { show: Boolean(one.points), size: one.hollow ? 12 : 7, fill: one.hollow ? "transparent" : stroke },
    };
    if (one.quiet) Object.assign(line, { alpha: 0.28, width: 1 });
    if (one.points) line.paths = () => null;
    if (this.stacked) Object.assign(line, { fill: stroke, width: 0.5, points: { show: false } });
    if (one.bars) line.paths = uPlot.paths.bars({ size: [0.9, 60], gap: 1 });
    if (this.stacked && !one.bars && index === 0) line.width = 0.5;
    return line;
  }

  buildLegend(series) {
    this.values = [];
    fill(
      this.legend,
      series.map((one) => {
        const value = h("b", {}, "–");
        this.values.push(value);
        if (one.quiet) return null;
        const mark = h(`i.key${one.dash ? ".dashed" : ""}${one.points ? ".dot" : ""}${one.hollow ? ".hollow" : ""}`, {
          style: { color: `var(${one.colour})` },
        });
        if (!one.colour.startsWith("--")) mark.style.color = one.colour;
        return h("span.entry", {}, mark, one.label, " ", value);
      }),
    );
  }

  // The values under the cursor; without one, the newest.
  tell(at) {
    if (!this.values || !this.raw) return;
    const steps = this.raw[0];
    this.values.forEach((place, i) => {
      const values = this.raw[i + 1] || [];
      let index = at ?? steps.length - 1;
      while (at === null && index > 0 && (values[index] === null || values[index] === undefined)) index -= 1;
      place.textContent = this.format(values[index] ?? null);
    });
    const here = at === null || at === undefined ? "" : steps[at];
    this.element.dataset.step = here;
    this.at.textContent = here === "" ? "" : `step ${number(here)}`;
  }

  // A range was selected: all charts zoom to it.
  selected(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    this.dragged = true;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    zoomTo(range);
    document.dispatchEvent(new CustomEvent("r3-zoom"));
  }

  applyZoom() {
    if (!this.plot || !this.plot.data[0].length) return;
    const steps = this.plot.data[0];
    const [min, max] = zoom || [steps[0], steps[steps.length - 1]];
    this.plot.setScale("x", { min, max });
  }

  pointAt(step) {
    this.plot.setCursor({ left: this.plot.valToPos(step, "x"), top: 10 });
  }

  clicked() {
    const { idx } = this.plot.cursor;
    if (this.open && !this.dragged && idx !== null && idx !== undefined) this.open(this.plot.data[0][idx]);
    this.dragged = false;
  }

  resize() {
    const width = this.place.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
    else if (!this.plot && width > 0 && this.drawn) {
      this.build();
      this.tell(null);
    }
  }

  destroy() {
    this.resizer.disconnect();
    if (this.plot) this.plot.destroy();
    this.plot = null;
    living.delete(this);
  }
}

// Stacked values: each series on top of those after it, so that drawing in order hides nothing.
function stack(data) {
  const [steps, ...columns] = data;
  const sums = new Array(steps.length).fill(0);
  const stacked = [...columns].reverse().map((values) =>
    values.map((value, i) => {
      if (value === null || value === undefined) return null;
      sums[i] += value;
      return sums[i];
    }),
  );
  return [steps, ...stacked.reverse()];
}

function yRange(stacked) {
  return (_, low, high) => {
    if (low === null || high === null) return [0, 1];
    if (stacked) return [0, high > 0.999 && high < 1.001 ? 1 : high * 1.05 || 1];
    const floor = low >= 0 && low < 0.6 * high ? 0 : low - (high - low || Math.abs(high) || 1) * 0.1;
    return [floor, high + (high - floor || 1) * 0.08];
  };
}

function short(format, value) {
  return Math.abs(value) >= 10_000
    ? `${Math.round(value / 1000).toLocaleString("en-GB")}k`
    : format(value)
        .replace(/(\.\d*?)0+(?=$| )/, "$1")
        .replace(/\.(?=$| )/, "");
}

// Vertical lines with a word at the top: epochs, first solutions.
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = colour("--ink-3");
  ctx.fillStyle = colour("--ink-2");
  ctx.setLineDash([3 * ratio, 3 * ratio]);
  ctx.lineWidth = ratio;
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  ctx.font = `${10 * ratio}px system-ui, sans-serif`;
  let free = -Infinity;
  for (const [step, word] of marks) {
    const x = Math.round(plot.valToPos(step, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (x > free && word) {
      const wide = ctx.measureText(word).width;
      ctx.fillText(word, Math.min(x, bbox.left + bbox.width - wide), bbox.top - 5 * ratio); // above the plot, clear of it
      free = x + wide + 6 * ratio;
    }
  }
  ctx.restore();
}
