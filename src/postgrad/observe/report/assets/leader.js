// Several runs: which one leads, in what, how surely, and in which keys of their recipes they differ.

import { choice, field, h, svg, table } from "./dom.js";
import { count, counted, number, plain } from "./format.js";
import { last } from "./series.js";

const FIRST = ["accuracy", "greedy_accuracy", "margin", "loss"];
const LESS_IS_BETTER = /(^|\/)(loss|nll|perplexity|calibration_error)$/;
const KEYS = 4; // differing keys beside the results
const RECENT = 10; // steps
const WIDTH = 220;

/** {name, less, of(run) -> {value, low, high, step} or null} of everything that runs can be ranked by,
 * what people ask for first at the start. */
export function measures(runs) {
  const found = new Map();
  for (const run of runs) {
    for (const line of run.evaluations) {
      for (const key of Object.keys(line)) {
        if (typeof line[`${key}_low`] !== "number" && key !== "loss") continue;
        if (typeof line[key] === "number") found.set(JSON.stringify([line.set ?? null, key]), [line.set ?? null, key]);
      }
    }
  }
  const place = ([, key]) => (FIRST.includes(key) ? FIRST.indexOf(key) : FIRST.length);
  const evaluated = [...found.values()].sort((a, b) => place(a) - place(b)).map(([set, key]) => ({
    name: set === null ? `eval/${key}` : `eval/${set}/${key}`,
    less: LESS_IS_BETTER.test(key),
    interval: "95% interval",
    of: (run) => {
      const line = run.evaluations.findLast((one) => (one.set ?? null) === set && typeof one[key] === "number");
      return line ? { value: line[key], low: line[`${key}_low`], high: line[`${key}_high`], step: line.step } : null;
    },
  }));
  const logged = ["reward", "loss"].filter((name) => runs.some((run) => run.names().includes(name)));
  return [...evaluated, ...logged.map((name) => ({ name, less: name === "loss", interval: `95% of the mean of ${RECENT} steps`, of: (run) => recent(run, name) }))];
}

/** The mean of the last steps, with its standard error from their spread. */
function recent(run, name) {
  const values = run.column(name).filter((value) => !Number.isNaN(value)).slice(-RECENT);
  if (!values.length) return null;
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  const spread = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / Math.max(1, values.length - 1) / values.length);
  const ends = values.length > 2 ? { low: mean - 1.96 * spread, high: mean + 1.96 * spread } : {};
  return { value: mean, ...ends, step: last(run.column("step")) };
}

/** The runs that have the measure, the best first. */
export function ranked(runs, measure) {
  const found = runs.map((run) => ({ run, ...measure.of(run) })).filter((one) => typeof one.value === "number");
  return found.sort((a, b) => (measure.less ? a.value - b.value : b.value - a.value));
}

export class Leader {
  constructor(store, view, differences) {
    Object.assign(this, { store, view });
    // critic.learner.lr, say, follows learner.lr unless it is set: where both are equal one is enough
    const follows = ([key, ...values]) => differences.some(([other, ...others]) => key.endsWith(`.${other}`) && JSON.stringify(values) === JSON.stringify(others));
    this.differences = differences.filter((row) => row[0] !== "run_dir" && !follows(row));
    this.element = h("div", { className: "leader" });
    this.shape = "";
    store.listen(() => this.update());
    view.listen(["by"], () => this.update());
  }

  update() {
    const { store, view } = this;
    this.element.hidden = store.runs.length < 2;
    if (this.element.hidden) return;
    const all = measures(store.runs).filter((one) => ranked(store.runs, one).length > 1);
    const measure = all.find((one) => one.name === view.get("by")) ?? all[0];
    const rows = measure ? ranked(store.runs, measure) : store.runs.map((run) => ({ run }));
    const shape = JSON.stringify([all.map((one) => one.name), measure?.name, rows.map(({ run, ...rest }) => [run.name, rest]), store.runs.map((run) => run.number)]);
    if (shape === this.shape) return;
    this.shape = shape;
    const select = () => choice(all.map((one) => [one.name, one.name]), measure.name, (name) => view.set({ by: name === all[0].name ? null : name }));
    this.element.replaceChildren(
      h("p", { className: "verdict" }, ...(measure ? verdict(rows, measure) : ["There is nothing yet by which these runs can be compared."])),
      all.length > 1 ? h("div", { className: "tools" }, field("Compare by", select())) : "",
      this.#table(rows, measure),
    );
  }

  #table(rows, measure) {
    const keys = this.differences.slice(0, KEYS);
    const columns = [{ name: "run" }, ...(measure ? [{ name: measure.name }, { name: measure.interval }, { name: "at step", number: true }] : []), ...keys.map(([key]) => ({ name: key }))];
    const ends = rows.flatMap(({ value, low, high }) => [value, low, high]).filter((one) => typeof one === "number");
    const range = [Math.min(...ends), Math.max(...ends)];
    const cells = rows.map(({ run, value, low, high, step }) => [
      h("span", { className: `run-name c${run.number}` }, run.name),
      ...(measure ? [number(value), h("span", { className: "interval" }, interval(run, { value, low, high }, range), typeof low === "number" ? h("span", { className: "quiet" }, `${number(low)} to ${number(high)}`) : ""), count(step)] : []),
      ...keys.map(([, ...values]) => h("code", { className: "wraps" }, plain(values[run.number] ?? "–"))),
    ]);
    const more = this.differences.length - keys.length;
    const rest = h("p", { className: "quiet" }, this.differences.length ? (more > 0 ? `They differ in ${counted(more, "more key")}: see Recipe.` : "") : "Their recipes are equal.");
    return h("div", {}, table("The runs, the best first, and what differs between them", columns, cells, { hidden: true }), rest);
  }
}

function verdict(rows, measure) {
  const [best, ...others] = rows;
  const lead = [h("strong", { className: `run-name c${best.run.number}` }, best.run.name), ` leads in ${measure.name}: ${number(best.value)}${measure.less ? ", less is better" : ""}. `];
  const known = others.filter((one) => typeof one.low === "number" && typeof best.low === "number");
  const close = known.filter((one) => one.low <= best.high && best.low <= one.high);
  const names = (list) => list.map((one) => one.run.name).join(", ");
  if (!known.length) return [...lead, "There are no intervals: this may be chance."];
  if (close.length) return [...lead, `The interval of ${names(close)} overlaps with its own: between them, this may be chance.`];
  return [...lead, "No other interval overlaps with its own."];
}

function interval(run, { value, low, high }, [from, to]) {
  const x = (at) => 6 + ((WIDTH - 12) * (at - from)) / (to - from || 1);
  return svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} 14`, class: `c${run.number}`, "aria-hidden": "true" },
    svg("path", { class: "grid", d: `M2 7H${WIDTH - 2}` }),
    typeof low === "number" ? svg("path", { class: "whisker", d: `M${x(low)} 7H${x(high)}` }) : "",
    svg("circle", { class: "dot still", cx: x(value), cy: 7, r: 3.5 }),
  );
}
