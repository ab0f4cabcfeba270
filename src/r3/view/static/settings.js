// The settings of a run, section by section, beside their defaults; and how it was started.

import { ask } from "./api.js";
import { choice, empty, fill, h, plural, searchField, table } from "./dom.js";

const chosen = { which: "all", text: "" };

export async function settingsPage(root, { run }) {
  const answer = await ask("settings", { run });
  if (!answer.sections.length) {
    fill(root, h("h1", {}, "Settings"), empty("No settings to show", "The run's config.yaml cannot be read."));
    return {};
  }
  const all = answer.sections.flatMap((section) => section.settings);
  const filters = h("div");
  const tables = h("div.sections");
  const draw = () => {
    fill(
      filters,
      choice(
        "settings",
        [
          ["all", `All ${all.length}`, "every setting, as the run resolved it"],
          ["changed", `Changed ${all.filter((one) => one.changed).length}`, "other than the default or its preset"],
        ],
        chosen.which,
        (value) => {
          chosen.which = value;
          draw();
        },
      ),
    );
    const drawn = answer.sections.map((section) => sectionTable(section, section.settings.filter(matches)));
    fill(tables, drawn.some(Boolean) ? drawn : empty("No such setting", "No setting of this run matches."));
  };
  const field = searchField("Search setting, value, help", chosen.text, (text) => {
    chosen.text = text;
    draw();
  });
  fill(
    root,
    h("div.toolbar", {}, h("h1", {}, "Settings"), filters, field),
    startCard(answer),
    answer.problems.map((problem) => h("p.quiet", {}, problem)),
    tables,
  );
  draw();
  return {};
}

function matches(one) {
  if (chosen.which === "changed" && !one.changed) return false;
  const text = `${one.key}\n${valueText(one.value)}\n${one.help || ""}`.toLowerCase();
  return text.includes(chosen.text.toLowerCase());
}

function startCard({ command, created, versions, resumed_from: resumes }) {
  const known = Object.entries(versions).filter(([, version]) => version);
  const fact = (name, ...value) => h("div", {}, h("dt", {}, name), h("dd", {}, ...value));
  const last = resumes[resumes.length - 1];
  return h(
    "dl.card.factrow.start",
    {},
    created && fact("started", created.replace("T", " ").replace("+00:00", " UTC")),
    resumes.length > 0 && fact("resumed", plural(resumes.length, "time"), h("small", {}, `last from step ${last}`)),
    known.map(([name, version]) => fact(name, version)),
    command && h("div.command", {}, h("dt", {}, "command"), h("dd", {}, h("pre", {}, command))),
  );
}

// As a recipe would write it, so that an empty text shows too.
export function valueText(value) {
  if (value === "") return '""';
  return typeof value === "string" ? value : JSON.stringify(value);
}

function sectionTable(section, settings) {
  if (!settings.length) return null;
  const whole = table(
    ["Setting", "Value", "Default"],
    settings.map((one) =>
      h(
        `tr${one.changed ? ".changed" : ""}`,
        { "data-key": one.key },
        h("td.key-name", {}, h("code", {}, one.key), one.help && h("small", {}, one.help)),
        h("td.value", {}, h("pre", {}, valueText(one.value))),
        h("td.default", { "data-name": "default" }, defaultOf(one)),
      ),
    ),
  );
  whole.querySelector("table").classList.add("settings");
  return h("section", {}, h("h2", {}, section.name, section.help && h("span.note", {}, section.help)), whole);
}

function defaultOf(one) {
  if (!one.changed) return null;
  return "default" in one ? h("pre", {}, valueText(one.default)) : h("span.quiet", {}, "none");
}
