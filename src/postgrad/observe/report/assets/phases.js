// Where the time of a step goes, and how much memory it took, against the plan.

import { h, svg, table } from "./dom.js";
import { bytes, percent, seconds } from "./format.js";
import { Chart } from "./chart.js";
import { median } from "./series.js";

const PHASE = /^([a-z]+)_seconds$/;
const PART = /^(?!estimated\/|reward\/)[a-z]+\/[a-z_]+_seconds$/;
const MEMORY = /^(?!estimated\/|reward\/).*(memory|reserved)_bytes$/;
const HEIGHT = 120;
const BARS = 140;

/** Stacked bars of the phases of a run, and a table of them. */
export class Phases {
  constructor(store, cursor, timelines) {
    this.store = store;
    this.element = h("div", {});
    this.cursor = cursor;
    this.charts = new Map();
    this.times = h("div", {});
    this.scale = h("div", {});
    this.memory = h("div", { className: "charts" });
    this.table = h("div", {});
    this.element.append(h("h3", {}, "Time"), this.times, timelines, this.scale, h("h3", {}, "Memory"), this.memory, this.table);
    store.listen((kinds) => (["metrics", "run", "reset"].some((kind) => kinds.has(kind)) ? this.update() : 0));
  }

  update() {
    const { runs } = this.store;
    this.times.replaceChildren(...runs.map((run) => timeline(run, this.store.many)));
    this.scale.replaceChildren(...runs.filter((run) => run.about.scale).map(scalePicture));
    this.table.replaceChildren(...runs.filter((run) => run.about.plan?.memory).map(memoryPlan));
    for (const name of new Set(runs.flatMap((run) => run.names().filter((one) => MEMORY.test(one))))) {
      if (this.charts.has(name)) continue;
      this.charts.set(name, this.#chart(name));
      this.memory.append(this.charts.get(name).element);
    }
    this.charts.forEach((chart) => chart.refresh());
  }

  #chart(name) {
    const { store } = this;
    const whole = name === "peak_memory_bytes";
    const series = (run, key, more) => ({ name: run.name, colour: run.number, xs: run.axis("step"), ys: run.column(key), ...more });
    return new Chart({
      title: name,
      about: whole ? "the process's peak plus what its verifiers hold" : "the most within the phase, above what the process held before",
      format: bytes,
      byFormat: true,
      cursor: this.cursor,
      read: () => ({
        series: store.runs.flatMap((run) => {
          const estimated = `estimated/${name}`;
          return run.names().includes(estimated) ? [series(run, name), series(run, estimated, { dashed: true, name: "estimated" })] : [series(run, name)];
        }),
        references: whole ? store.runs.filter((run) => !run.names().includes(`estimated/${name}`)).flatMap(peakOf) : [],
        marks: store.runs.flatMap((run) => run.resumes()),
        fromZero: true,
        xName: "step",
      }),
    });
  }
}

function scalePicture(run) {
  const text = `Seconds of a step of ${run.name} over the number of devices, a line for each max_staleness: simulated`;
  return h("figure", { className: "scale-picture" }, h("h3", {}, "On more devices"), h("img", { src: run.about.scale, alt: text }), h("figcaption", { className: "quiet" }, text));
}

function peakOf(run) {
  const peak = run.about.plan?.memory?.peak_bytes;
  return typeof peak === "number" ? [{ value: peak, name: "estimated" }] : [];
}

function phasesOf(run) {
  const found = new Map();
  for (const name of run.names()) {
    const phase = PHASE.exec(name)?.[1];
    if (phase) found.set(phase, run.column(name).map((value) => (Number.isNaN(value) ? 0 : value)));
  }
  return found;
}

function timeline(run, many) {
  const phases = phasesOf(run);
  if (!phases.size) return h("p", { className: "quiet" }, `${run.name}: no step has ended yet.`);
  const names = [...phases.keys()];
  const bars = bucketed(run, phases);
  const estimated = names.reduce((sum, name) => sum + (estimatedOf(run, name) || 0), 0);
  const most = Math.max(estimated, ...bars.map((bar) => bar.parts.reduce((a, b) => a + b, 0)));
  const root = svg("svg", { class: "bars", viewBox: `0 0 ${bars.length} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `Seconds of each step of ${run.name} by phase; the table below has the sums` });
  bars.forEach((bar, x) => {
    let top = HEIGHT;
    const column = svg("g", {}, svg("title", {}, `steps ${bar.from} to ${bar.to}: ${names.map((name, i) => `${name} ${seconds(bar.parts[i])}`).join(", ")}`));
    bar.parts.forEach((part, i) => {
      const height = (HEIGHT * part) / most;
      top -= height;
      column.append(svg("rect", { class: `phase p${i % 6}`, x: x + 0.04, width: 0.92, y: top, height }));
    });
    root.append(column);
  });
  if (estimated) {
    const y = HEIGHT * (1 - estimated / most);
    root.append(svg("path", { class: "reference", "vector-effect": "non-scaling-stroke", d: `M0 ${y}H${bars.length}` }));
  }
  return h(
    "div",
    { className: "timeline" },
    many ? h("h4", { className: `run-name c${run.number}` }, run.name) : null,
    h("p", { className: "scale quiet" }, `0 to ${seconds(most)} a step, steps 1 to ${run.steps}${estimated ? `; the dashed line is the estimate: ${seconds(estimated)}` : ""}`),
    root,
    phaseTable(run, phases),
  );
}

/** Seconds of a phase that the run's plan estimates, NaN where it had none. */
function estimatedOf(run, name) {
  return median(run.column(`estimated/${name}_seconds`));
}

function bucketed(run, phases) {
  const steps = run.column("step");
  const buckets = Math.min(BARS, steps.length);
  return Array.from({ length: buckets }, (_, bucket) => {
    const from = Math.floor((bucket * steps.length) / buckets);
    const to = Math.floor(((bucket + 1) * steps.length) / buckets);
    const parts = [...phases.values()].map((list) => list.slice(from, to).reduce((a, b) => a + b, 0) / (to - from));
    return { from: steps[from], to: steps[to - 1], parts };
  });
}

function phaseTable(run, phases) {
  const sums = [...phases.values()].map((list) => list.reduce((a, b) => a + b, 0));
  const whole = sums.reduce((a, b) => a + b, 0);
  const plan = run.names().some((name) => name.startsWith("estimated/"));
  const estimated = (name) => (plan ? [seconds(estimatedOf(run, name))] : []);
  const columns = [{ name: "phase" }, ...["in all", "share", "a step, median", ...(plan ? ["estimated"] : [])].map((name) => ({ name, number: true }))];
  const rows = [...phases].map(([name, list], i) => [
    h("span", { className: `key p${i % 6}` }, name),
    seconds(sums[i]),
    percent(sums[i] / (whole || 1)),
    seconds(median(list)),
    ...estimated(name),
  ]);
  const parts = run.names().filter((name) => PART.test(name)).map((name) => {
    const list = run.column(name).filter((value) => !Number.isNaN(value));
    const sum = list.reduce((a, b) => a + b, 0);
    return [h("span", { className: "part" }, name.replace("_seconds", "")), seconds(sum), percent(sum / (whole || 1)), seconds(median(list)), ...estimated(name.replace("_seconds", ""))];
  });
  return table(`Phases of ${run.name}`, columns, [...rows, ...parts], { hidden: true });
}

function memoryPlan(run) {
  const { roles = {}, phases = {}, peak_phase: peak } = run.about.plan.memory;
  const names = Object.keys(phases);
  const columns = [{ name: "role" }, { name: "what" }, ...names.map((name) => ({ name: name === peak ? `${name} (peak)` : name, number: true }))];
  const rows = Object.entries(roles).flatMap(([role, held]) =>
    Object.entries(held).map(([what, of]) => [role, what, ...names.map((name) => (of[name] ? bytes(of[name]) : ""))]),
  );
  rows.push(["sum", "", ...names.map((name) => bytes(phases[name]))]);
  return h("details", {}, h("summary", {}, `What the plan estimates of memory: ${run.name}`), table(`Estimated memory of ${run.name}`, columns, rows, { hidden: true }));
}
