// What engines and learner did in each step, drawn to time: sampling, learning, waiting, publishing.

import { h, svg, table } from "./dom.js";
import { count, percent, seconds } from "./format.js";

const ENGINE = /^engine\/([\d.]+)\/busy_seconds$/;
const STEPS = 8; // drawn at once
const MOST = 60;
const NAMES = ["sampling", "publishing", "learning", "other", "waiting"];

/** Whether samples are drawn ahead of the policy, or by several engines: else phases say it all. */
function told(run) {
  return run.names().some((name) => name.startsWith("staleness/") || name.startsWith("overlap/") || ENGINE.test(name));
}

/** {seconds, lanes} of a metric line; a lane is [name, [[doing, seconds], ...]] in the order of time.
 *
 * Where samples are drawn while the policy learns, the learner waits before it in the first step and
 * where the engine had ended early, else after it. Metrics tell sums, so an engine's own waiting
 * stands at the end of its sampling. */
export function lanes(line, first) {
  const of = (name) => (typeof line[name] === "number" ? Math.max(0, line[name]) : 0);
  const [sample, train, publish] = ["sample", "train", "publish"].map((name) => of(`${name}_seconds`));
  const other = of("log_seconds") + of("other_seconds");
  const beside = Math.min(train, of("overlap/sample_seconds"));
  const after = beside > 0 && !first && of("overlap/engine_wait_seconds") === 0 ? sample : 0;
  const before = sample - after;
  const learner = [["waiting", before], ["learning", train], ["waiting", after], ["publishing", publish], ["other", other]];
  const engines = Object.keys(line).filter((name) => ENGINE.test(name));
  const rest = [["publishing", publish], ["waiting", other]];
  const engine = [["sampling", before + beside], ["waiting", train - beside], ["sampling", after], ...rest];
  const each = engines.map((name) => {
    const busy = Math.min(of(name), sample + beside);
    return [`engine ${ENGINE.exec(name)[1]}`, [["sampling", busy], ["waiting", sample + train - busy], ...rest]];
  });
  return {
    seconds: sample + train + publish + other,
    lanes: [...(each.length ? each : [["engine", engine]]), ["learner", learner]],
  };
}

export class Timelines {
  constructor(store, view, zoom) {
    Object.assign(this, { store, view, zoom });
    this.body = h("div", {});
    this.slider = h("input", { type: "range", step: 1, min: 0 });
    this.slider.addEventListener("input", () => view.set({ at: this.slider.value }));
    this.tools = h("div", { className: "tools" }, h("label", { className: "tick-box" }, h("span", { className: "quiet" }, "Other steps"), this.slider));
    this.element = h("div", {}, h("h3", {}, "Engines and learner"), this.tools, this.body);
    this.element.hidden = true;
    store.listen((kinds) => (["metrics", "reset", "chosen"].some((kind) => kinds.has(kind)) ? this.update() : 0));
    view.listen(["at", "zoom", "over"], () => this.update());
  }

  update() {
    const runs = this.store.runs.filter(told);
    this.element.hidden = !runs.length;
    if (!runs.length) return;
    const steps = Math.max(...runs.map((run) => run.metrics.length));
    const range = this.zoom.range("step");
    const most = range ? Math.min(MOST, Math.max(1, range[1] - range[0] + 1)) : STEPS;
    this.tools.hidden = steps <= most || range !== null;
    const latest = Math.max(0, steps - most);
    const chosen = this.view.number("at");
    const from = range ? null : Math.min(latest, chosen >= 0 ? Math.floor(chosen) : latest);
    this.slider.max = latest;
    this.slider.value = from ?? 0;
    this.body.replaceChildren(legend(), ...runs.map((run) => this.#run(run, from, most, range)));
  }

  #run(run, from, most, range) {
    const lines = run.metrics.map((line, i) => ({ line, first: i === 0 || run.resumes().includes(line.step - 1) }));
    const start = range ? lines.findIndex(({ line }) => line.step >= range[0]) : from;
    const shown = start < 0 ? [] : lines.slice(start, start + most);
    const steps = shown.map(({ line, first }) => ({ step: line.step, ...lanes(line, first) }));
    const whole = steps.reduce((sum, one) => sum + one.seconds, 0);
    const heading = this.store.many ? h("h4", { className: `run-name c${run.number}` }, run.name) : null;
    if (!whole) return h("div", {}, heading, h("p", { className: "quiet" }, "None of its steps is here."));
    const names = [...new Set(steps.flatMap((one) => one.lanes.map(([name]) => name)))];
    const about = `Steps ${count(steps[0].step)} to ${count(steps[steps.length - 1].step)}, ${seconds(whole)}`;
    return h(
      "div",
      { className: "gantt" },
      heading,
      h("p", { className: "scale quiet" }, about),
      h("div", { className: "lanes", role: "img", "aria-label": `${about}: what engines and learner of ${run.name} did; the table below has the shares` }, names.flatMap((name) => [h("span", { className: "lane" }, name), drawn(steps, name, whole)]), h("span", {}), axis(steps, whole)),
      shares(run, lines),
    );
  }
}

function legend() {
  return h("p", { className: "legend" }, NAMES.map((name) => h("span", { className: `key ${name}` }, name)));
}

function drawn(steps, name, whole) {
  const root = svg("svg", { viewBox: "0 0 1000 20", preserveAspectRatio: "none" });
  const wide = 1000 / whole;
  let start = 0;
  for (const { step, seconds: of, lanes: all } of steps) {
    let x = start;
    for (const [doing, spent] of all.find(([lane]) => lane === name)?.[1] ?? []) {
      if (spent > 0) root.append(svg("rect", { class: `doing ${doing}`, x: x * wide, y: 1, width: spent * wide, height: 18 }, svg("title", {}, `step ${step}: ${doing} ${seconds(spent)}`)));
      x += spent;
    }
    start += of;
    root.append(svg("path", { class: "border", d: `M${start * wide} 0V20`, "vector-effect": "non-scaling-stroke" }));
  }
  return root;
}

function axis(steps, whole) {
  const row = h("div", { className: "steps" });
  const every = Math.ceil(steps.length / 10);
  let start = 0;
  steps.forEach((one, i) => {
    if (i % every === 0) {
      const mark = h("span", {}, String(one.step));
      mark.style.left = `${(100 * start) / whole}%`;
      row.append(mark);
    }
    start += one.seconds;
  });
  return row;
}

function shares(run, lines) {
  const sums = new Map();
  for (const { line, first } of lines) {
    for (const [name, parts] of lanes(line, first).lanes) {
      if (!sums.has(name)) sums.set(name, new Map());
      const sum = sums.get(name);
      for (const [doing, spent] of parts) sum.set(doing, (sum.get(doing) ?? 0) + spent);
    }
  }
  const columns = [{ name: "whole run" }, ...NAMES.map((name) => ({ name, number: true }))];
  const rows = [...sums].map(([name, sum]) => {
    const whole = [...sum.values()].reduce((a, b) => a + b, 0) || 1;
    return [name, ...NAMES.map((doing) => (sum.get(doing) ? percent(sum.get(doing) / whole) : "–"))];
  });
  return table(`Shares of the time of engines and learner of ${run.name}`, columns, rows, { hidden: true });
}
