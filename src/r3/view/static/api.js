// Answers about the runs: from the server, or in an exported file from the answers stored in it.

const stored = document.getElementById("r3-answers");
const answers = stored ? JSON.parse(stored.textContent) : null;

export const exported = answers !== null;

export class Refused extends Error {}

const addressOf = (name, parameters) =>
  `${name}?${Object.keys(parameters)
    .sort()
    .map((key) => `${key}=${encodeURIComponent(parameters[key])}`)
    .join("&")}`;

export async function ask(name, parameters = {}) {
  const address = addressOf(name, parameters);
  if (exported) return fromExport(name, parameters, address);
  let reply;
  try {
    reply = await fetch(`/api/${address}`);
  } catch {
    throw new Refused("r3 view does not answer: it was stopped. Start it again and reload this page.");
  }
  const body = await reply.json().catch(() => ({ error: `the server answered ${reply.status}` }));
  if (!reply.ok) throw new Refused(body.error);
  return body;
}

function fromExport(name, parameters, address) {
  if (address in answers) return answers[address];
  if (name === "search") return searchExport(parameters);
  if (name === "queries") return listExport(parameters);
  throw new Refused("This is not in the exported report: open the run itself with r3 view, or export more steps.");
}

function searchExport({ run, step, text }) {
  const wanted = text.toLowerCase();
  const groups = answers[addressOf("step", { run, step })].groups;
  const holds = (value) =>
    String(value || "")
      .toLowerCase()
      .includes(wanted);
  return {
    groups: groups
      .map((_, group) => group)
      .filter((group) => {
        const full = answers[addressOf("group", { run, step, group })];
        return (
          holds(groups[group].query) ||
          holds(groups[group].question) ||
          (full && (holds(full.prompt) || full.samples.some((sample) => holds(sample.preview))))
        );
      }),
  };
}

function listExport({ run, search, order }) {
  const known = answers[addressOf("queries", { run, search: "", order: "hardest" })];
  const rate = (query) => (query.tried ? query.solved / query.tried : 0);
  const orders = {
    hardest: (a, b) => rate(a) - rate(b),
    easiest: (a, b) => rate(b) - rate(a),
    newest: (a, b) => b.last - a.last,
    replayed: (a, b) => b.replays - a.replays,
  };
  const queries = known.queries
    .filter((query) => `${query.query}\n${query.question}`.toLowerCase().includes((search || "").toLowerCase()))
    .sort(orders[order] || orders.hardest);
  return { ...known, queries, matching: search ? queries.length : known.matching };
}
