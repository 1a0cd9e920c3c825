// What belongs to a sample: its group, and the same prompt at other steps and in other runs.

import { h, table } from "./dom.js";
import { count, fixed, preview } from "./format.js";

const MOST = 60;

/** The other samples of the group; `open(row)` shows one. */
export function groupTable(store, row, open) {
  const { group } = row;
  const rows = store.all[row.run].rows.slice(group.first, group.first + group.size);
  if (rows.length < 2) return null;
  const columns = [{ name: "sample" }, { name: "reward", number: true }, { name: "advantage", number: true }, { name: "response" }];
  const cells = rows.map((one) => [
    one === row ? h("strong", {}, `${one.sample}`) : link(`${one.sample}`, `Sample ${one.sample} of this group`, () => open(one)),
    fixed(one.total, 3),
    fixed(one.advantage, 3),
    h("span", { className: "mono" }, preview(one.text, 90)),
  ]);
  return h("div", {}, h("h4", {}, "Its group"), table("Samples of the same prompt and step", columns, cells, { hidden: true }));
}

/** Every group of the same row of the data, over steps and runs. */
export function promptTable(store, row, open) {
  const groups = [];
  const seen = new Set();
  for (const run of store.runs) {
    for (const one of run.rows) {
      if (one.group.key === row.group.key && !seen.has(one.group)) {
        seen.add(one.group);
        groups.push({ run, group: one.group, rows: run.rows.slice(one.group.first, one.group.first + one.group.size) });
      }
    }
  }
  if (groups.length < 2) return null;
  groups.sort((a, b) => a.group.step - b.group.step || a.run.number - b.run.number);
  const columns = [{ name: "step" }, { name: "run" }, { name: "mean reward", number: true }, { name: "best response" }];
  const cells = groups.slice(0, MOST).map(({ run, group, rows }) => {
    const known = rows.filter((one) => typeof one.total === "number");
    const mean = known.reduce((sum, one) => sum + one.total, 0) / known.length;
    const best = known.reduce((a, b) => (b.total > a.total ? b : a), known[0] ?? rows[0]);
    const here = group === row.group;
    return [
      here ? h("strong", {}, `${count(group.step)}`) : link(count(group.step), `This prompt at step ${group.step} of ${run.name}`, () => open(best)),
      h("span", { className: `run-name c${run.number}` }, run.name),
      fixed(mean, 3),
      h("span", { className: "mono" }, preview(best.text, 90)),
    ];
  });
  return h("div", {}, h("h4", {}, "The same prompt"), table("The same prompt over steps and runs", columns, cells, { hidden: true }));
}

function link(text, label, click) {
  return h("button", { type: "button", className: "link", "aria-label": label, click }, text);
}
