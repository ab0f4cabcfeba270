// The frame: the bar on top, below it the page that the address names, and a look every second at whether the run has
// moved on.

import { cursorStep, forgetCharts, moveCursor, repaint, zoomTo } from "./charts.js";
import { exported, follow, load, refreshState, Refused, store } from "./data.js";
import { button, empty, fill, h, isDark, number } from "./dom.js";
import { groupPage } from "./group.js";
import { overviewPage, runColour, setFocus } from "./overview.js";
import { bufferPage, settingsPage } from "./pages.js";
import { probePage } from "./probe.js";
import { queriesPage, queryPage, stepsPage } from "./queries.js";

const EVERY = 1500;
const PAGES = {
  overview: overviewPage,
  steps: stepsPage,
  group: groupPage,
  queries: queriesPage,
  query: queryPage,
  buffer: bufferPage,
  settings: settingsPage,
  probe: probePage,
};
const TABS = [
  ["overview", "Overview"],
  ["steps", "Steps"],
  ["queries", "Queries"],
  ["buffer", "Buffer"],
  ["settings", "Settings"],
];
const IN_TAB = { group: "steps", query: "queries" };
const main = document.getElementById("main");
const shown = { page: null, visit: 0, run: 0, name: "overview" };

// #/RUN/PAGE/more/parts
function route() {
  const [run, name, ...parts] = location.hash.replace(/^#\//, "").split("/").filter(Boolean);
  const known = Number(run) < store.runs.length;
  const page = name in PAGES ? name : "overview";
  return { run: known ? Number(run) : 0, name: store.runs.length ? page : "probe", parts };
}

function go(to, instead = false) {
  const next = `#/${to}`;
  if (instead || next === location.hash) {
    history.replaceState(null, "", next);
    show();
  } else location.hash = next;
}

async function show() {
  const { run, name, parts } = route();
  const visit = ++shown.visit;
  if (shown.name !== name) zoomTo(null);
  const same = shown.name === name && shown.run === run;
  Object.assign(shown, { run, name, page: null });
  setFocus(run);
  drawBar();
  forgetCharts();
  const room = h("div.page", { "data-page": name });
  try {
    const page = await PAGES[name](room, { run, parts, go });
    if (visit !== shown.visit) return;
    shown.page = page;
  } catch (error) {
    if (visit !== shown.visit) return;
    if (!(error instanceof Refused)) console.error(error);
    fill(room, empty("This cannot be shown", error.message));
  }
  fill(main, room);
  main.dataset.ready = location.hash || "#/";
  if (!same) scrollTo(0, 0);
  document.title = `${store.about[run] ? store.about[run].name : "r3"} · ${name} · r3 view`;
}

function drawBar() {
  const { run, name } = shown;
  const tab = IN_TAB[name] || name;
  const state = store.state[run] || { status: "empty" };
  fill(
    document.getElementById("bar"),
    h("a.brand", { href: `#/${run}/overview` }, "r3 ", h("span", {}, "view")),
    runPicker(run, tab),
    h(
      "nav",
      { "aria-label": "pages" },
      tabs().map(([page, title]) =>
        h("a", { href: `#/${run}/${page}`, "aria-current": tab === page ? "page" : null }, title),
      ),
    ),
    store.runs.length > 0 && h(
      "span.status",
      { "data-status": exported ? "exported" : state.status, title: store.about[run] ? store.about[run].path : "" },
      h("i"),
      exported ? "exported report" : state.status,
      state.step === null || state.step === undefined
        ? ""
        : ` · step ${number(state.step)}${state.planned ? ` of ${number(state.planned)}` : ""}`,
    ),
    h(
      "span.tools",
      {},
      button("◐", toggleTheme, { title: "light or dark (t)", "aria-label": "light or dark" }),
      button("?", showHelp, { title: "keys (?)", "aria-label": "keys" }),
    ),
  );
  fill(
    document.getElementById("problems"),
    (state.problems || []).map((problem) => h("p", {}, problem)),
  );
}

// Tabs of runs and of probes, only where there are any.
const tabs = () => [...(store.runs.length ? TABS : []), ...(store.probes.length ? [["probe", "Probe"]] : [])];

function runPicker(run, tab) {
  if (store.about.length < 2)
    return h(
      "span.name",
      { title: store.about[0] ? store.about[0].path : "" },
      store.about[0] ? store.about[0].name : "",
    );
  return h(
    "span.name",
    {},
    h("i.key", { style: { color: `var(${runColour(run)})` } }),
    h(
      "select",
      { "aria-label": "run", onchange: (event) => go(`${event.target.value}/${tab}`) },
      store.about.map((about, i) => h("option", { value: i, selected: i === run }, about.name)),
    ),
  );
}

function toggleTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("r3-theme", theme);
  } catch {
    /* a file opened from disk may have no storage */
  }
  repaint();
  if (shown.name === "group") show();
}

function up() {
  const { run, name, parts } = route();
  if (name === "group") return go(`${run}/steps/${parts[0]}`);
  if (name === "query") return go(`${run}/queries`);
  return go(`${run}/overview`);
}

async function watch() {
  const before = JSON.stringify(store.state);
  try {
    await refreshState();
    document.body.classList.remove("lost");
  } catch (error) {
    document.body.classList.add("lost");
    fill(document.getElementById("problems"), h("p", {}, error.message));
    return;
  }
  if (JSON.stringify(store.state) === before) return;
  const moved = store.state.map(
    (state, run) => state.lines !== store.runs[run].steps.length || state.generation !== store.runs[run].generation,
  );
  await Promise.all(moved.map((yes, run) => yes && follow(run)));
  drawBar();
  if (shown.page && shown.page.update) await shown.page.update(store.state[shown.run]);
}

// One question at a time, and none while the page is hidden.
function keepWatching() {
  setTimeout(async () => {
    if (!document.hidden) await watch().catch((error) => console.error(error));
    keepWatching();
  }, EVERY);
}

async function start() {
  try {
    const theme = localStorage.getItem("r3-theme");
    if (theme) document.documentElement.dataset.theme = theme;
  } catch {
    /* no storage: the system's theme it is */
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  try {
    await load();
  } catch (error) {
    fill(main, empty("This cannot be shown", error.message));
    return;
  }
  addEventListener("hashchange", show);
  listen({ go, up, theme: toggleTheme, page: () => shown.page, run: () => shown.run });
  await show();
  if (!exported) keepWatching();
}

// Keyboard shortcuts for rows, steps and pages; none while typing into a field.

const KEYS = [
  ["1 … 6", "overview, steps, queries, buffer, settings, probe"],
  ["j k", "next, previous row or sample"],
  ["Enter", "open the row, or the step under the cursor"],
  ["[ ]", "previous, next step or group"],
  ["← →", "move the cursor of the charts"],
  ["0", "show all steps again"],
  ["/", "search"],
  ["Esc", "back up"],
  ["t", "light or dark"],
  ["?", "this list"],
];

function listen(context) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.closest("input, textarea, select");
    if (typing) {
      if (event.key === "Escape") typing.blur();
      return;
    }
    const act = actions(context, event)[event.key];
    if (act && act() !== false) event.preventDefault();
  });
}

function actions(context, event) {
  const page = context.page() || {};
  const { go } = context;
  return {
    1: () => go(`${context.run()}/overview`),
    2: () => go(`${context.run()}/steps`),
    3: () => go(`${context.run()}/queries`),
    4: () => go(`${context.run()}/buffer`),
    5: () => go(`${context.run()}/settings`),
    6: () => go(`${context.run()}/probe`),
    j: () => (page.moveRow ? page.moveRow(1) : moveRow(1)),
    k: () => (page.moveRow ? page.moveRow(-1) : moveRow(-1)),
    "[": () => page.move && page.move(-1),
    "]": () => page.move && page.move(1),
    ArrowRight: () => moveCursor(event.shiftKey ? 10 : 1) !== null,
    ArrowLeft: () => moveCursor(event.shiftKey ? -10 : -1) !== null,
    Enter: () => {
      if (event.target.closest("a, button, summary")) return false;
      const step = cursorStep();
      return page.open && step !== null ? page.open(step) : false;
    },
    0: () => {
      zoomTo(null);
      document.dispatchEvent(new CustomEvent("r3-zoom"));
    },
    "/": () => {
      const field = document.querySelector("input.search");
      if (!field) return false;
      field.focus();
      return true;
    },
    Escape: () => context.up(),
    t: () => context.theme(),
    "?": () => showHelp(),
  };
}

function moveRow(by) {
  const links = [...document.querySelectorAll("[data-row] [data-open]")];
  if (!links.length) return false;
  const at = links.indexOf(document.activeElement);
  const next = links[at < 0 ? 0 : Math.min(Math.max(at + by, 0), links.length - 1)];
  next.focus();
  next.closest("[data-row]").scrollIntoView({ block: "nearest" });
  return true;
}

function showHelp() {
  const dialog = document.getElementById("help");
  fill(
    dialog,
    h("h2", {}, "Keys"),
    h(
      "table",
      {},
      h(
        "tbody",
        {},
        KEYS.map(([keys, what]) =>
          h(
            "tr",
            {},
            h(
              "td",
              {},
              keys.split(" ").map((key) => [h("kbd", {}, key), " "]),
            ),
            h("td", {}, what),
          ),
        ),
      ),
    ),
    button("Close", () => dialog.close()),
  );
  dialog.showModal();
}

start();
