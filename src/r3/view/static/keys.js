// Keyboard shortcuts for rows, steps and pages; none while typing into a field.

import { moveCursor, cursorStep, zoomTo } from "./charts.js";
import { button, fill, h } from "./dom.js";

export const KEYS = [
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

export function listen(context) {
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

export function showHelp() {
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
