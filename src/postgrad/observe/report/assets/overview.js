// The first look: what ran, how far it is, what came of it.

import { h, table } from "./dom.js";
import { bytes, count, fixed, number, plain, seconds } from "./format.js";
import { Leader } from "./leader.js";
import { last, median } from "./series.js";

export class Overview {
  constructor(store, view, differences) {
    this.store = store;
    this.body = h("div", {});
    this.element = h("div", {}, new Leader(store, view, differences).element, this.body);
    store.listen(() => this.update());
  }

  update() {
    const { runs, many } = this.store;
    const parts = [
      ...runs.map((run) => lead(run, many)),
      runs.length > 1 ? compared(runs) : figures(runs[0]),
      ...runs.flatMap((run) => health(run, many)),
      ...runs.flatMap((run) => run.troubles.map((text) => h("p", { className: "trouble", role: "status" }, `${run.name}: ${text}`))),
    ];
    const shape = parts.map((part) => part.textContent).join("\n");
    if (shape !== this.shape) this.body.replaceChildren(...parts);
    this.shape = shape;
  }
}

function lead(run, many) {
  const { recipe = {}, summary } = run.about;
  const where = recipe.model?.path ?? (recipe.model?.init ? `a fresh ${recipe.model.init.type ?? "model"}` : null);
  const facts = [
    recipe.job,
    recipe.algorithm?.type,
    where,
    recipe.seed === undefined ? null : `seed ${recipe.seed}`,
    state(run),
    run.forked ? `forked from ${plain(run.forked.source).split("/").pop()} at step ${plain(run.forked.step)}` : null,
  ];
  return h(
    "p",
    { className: "lead" },
    many ? h("span", { className: `run-name c${run.number}` }, run.name) : null,
    facts.filter(Boolean).map((fact) => h("span", {}, plain(fact))),
  );
}

function state(run) {
  const { steps, planned, finished } = run;
  const of = planned ? `${count(steps)} of ${count(planned)} steps` : `${count(steps)} steps`;
  return finished ? `finished, ${of}` : of;
}

/** What the sentinels said, the newest of each; that they are silent only of a run that says it began. */
function health(run, many) {
  const who = many ? `${run.name}: ` : "";
  const told = new Map();
  for (const one of run.events) {
    if (one.event === "sentinel") told.set(one.sentinel, { ...one, until: null });
    if (one.event === "sentinel_silent" && told.has(one.sentinel)) told.get(one.sentinel).until = one.step;
  }
  if (!told.size && !run.events.some((one) => one.event === "started")) return [];
  if (!told.size) return [h("p", { className: "health" }, `${who}sentinels silent: nothing looked wrong`)];
  return [...told.values()].map(({ sentinel, message, step, until }) =>
    h(
      "p",
      { className: until === null ? "health trouble" : "health" },
      h("strong", {}, plain(`${who}sentinel ${sentinel}`)),
      plain(`${during(step, until)}: ${message}`),
    ),
  );
}

function during(step, until) {
  if (typeof step !== "number") return "";
  return typeof until === "number" ? `, steps ${count(step)} to ${count(until)}` : ` since step ${count(step)}`;
}

/** [name, first, last, detail] of what a person asks first. */
function results(run) {
  const found = [];
  const sets = new Set(run.evaluations.map((line) => line.set));
  for (const set of [...sets].slice(0, 3)) {
    const lines = run.evaluations.filter((line) => line.set === set);
    const [one, two] = [lines[0], lines[lines.length - 1]];
    for (const [key, name] of [["accuracy", "accuracy"], ["greedy_accuracy", "greedy accuracy"], ["loss", "held-out loss"], ["margin", "margin"]]) {
      if (typeof two[key] !== "number") continue;
      const ends = typeof two[`${key}_low`] === "number" ? `${fixed(two[`${key}_low`], 3)} to ${fixed(two[`${key}_high`], 3)} (95%)` : "";
      found.push([set === null || sets.size === 1 ? name : `${set}: ${name}`, fixed(one[key], 3), fixed(two[key], 3), ends]);
    }
  }
  for (const [key, name, form] of [
    ["reward", "reward", (v) => fixed(v, 3)],
    ["loss", "loss", number],
    ["policy/entropy", "entropy", number],
    ["response_length", "response length", (v) => fixed(v, 1)],
  ]) {
    const values = run.column(key).filter((value) => !Number.isNaN(value));
    if (values.length && !(key === "loss" && values.every((v) => Math.abs(v) < 1e-6))) {
      found.push([name, form(values[0]), form(values[values.length - 1]), `at step ${count(run.steps)}`]);
    }
  }
  return found;
}

function speeds(run) {
  const times = run.axis("seconds");
  const memory = run.column("peak_memory_bytes").filter((value) => !Number.isNaN(value));
  const evaluating = run.evaluations.reduce((sum, line) => sum + (line.evaluate_seconds ?? 0), 0);
  const found = [["time in steps", seconds(last(times)), evaluating ? `and ${seconds(evaluating)} in evaluations` : ""]];
  for (const [key, name] of [["response_tokens_per_second", "sampled"], ["train_tokens_per_second", "trained"]]) {
    const speed = median(run.column(key));
    if (!Number.isNaN(speed)) found.push([name, `${count(Math.round(speed))} tok/s`, "median of the steps"]);
  }
  if (memory.length) found.push(["peak memory", bytes(memory.reduce((a, b) => Math.max(a, b))), planned(run)]);
  return found;
}

/** With what the process held before, where the run says so. */
function planned(run) {
  const whole = last(run.column("estimated/peak_memory_bytes"));
  const peak = Number.isFinite(whole) ? whole : run.about.plan?.memory?.peak_bytes;
  return typeof peak === "number" ? `estimated ${bytes(peak)}` : "";
}

function figures(run) {
  const change = (first, now) =>
    first === now || first === "–" ? now : [h("span", { className: "from" }, `${first} → `), now];
  const tiles = [
    ...results(run).map(([name, first, now, detail]) => [name, change(first, now), detail]),
    ...speeds(run),
  ];
  return h(
    "dl",
    { className: "figures" },
    tiles.map(([name, value, detail]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value), h("dd", { className: "detail" }, detail || "\u00a0")),
    ),
  );
}

function compared(runs) {
  const all = runs.map((run) => new Map([
    ...results(run).map(([name, first, now, detail]) => [name, first === now ? now : `${first} → ${now}`, detail]),
    ...speeds(run),
  ].map(([name, value]) => [name, value])));
  const names = [...new Set(all.flatMap((one) => [...one.keys()]))];
  const columns = [{ name: "" }, ...runs.map((run) => ({ name: run.name, number: true }))];
  return table("The runs in numbers", columns, names.map((name) => [name, ...all.map((one) => one.get(name) ?? "–")]), { hidden: true });
}
