// Batch numbers, evaluations, events and recipes.

import { choice, field, h, searchBox, svg, table } from "./dom.js";
import { count, ENDS, fixed, plain, seconds } from "./format.js";

const LOUD = new Set(["sentinel", "warning", "failure", "failed", "error"]);
const TOLD_APART = new Set(["data", "started", "resumed"]); // each has facts of its own
const SHOWN = 200;

/** The batch: every number with its unit and formula. */
export function batchTables(run, many) {
  const rows = run.about.batch;
  if (!rows?.length) {
    return h("p", { className: "quiet" }, `${run.name}: ${run.about.batch_problem ?? "no batch numbers are known"}`);
  }
  const started = run.events.findLast((one) => one.micro_train_tokens !== undefined);
  const told = (name, value) => (value === "at start" && started ? count(started[name]) : /^\d+$/.test(value) ? count(Number(value)) : value);
  const columns = [{ name: "name" }, { name: "number", number: true }, { name: "unit and formula" }];
  return table(
    `Batch of ${run.name}`,
    columns,
    rows.map(([name, value, text]) => [h("code", {}, name), told(name, value), h("span", { className: "quiet" }, text)]),
    { hidden: !many },
  );
}

/** One table for each set: a row an evaluation, intervals drawn, each quantity's on one scale in all runs. */
export function evaluationTables(run, many, runs) {
  const sets = [...new Set(run.evaluations.map((line) => line.set))];
  return sets.map((set) => {
    const lines = run.evaluations.filter((line) => line.set === set);
    const keys = Object.keys(Object.assign({}, ...lines)).filter(
      (key) => !/^(step|update|set)$|^rows\//.test(key) && !ENDS.test(key) && lines.some((line) => typeof line[key] === "number"),
    );
    const columns = [{ name: "step", number: true }, ...keys.map((name) => ({ name: name === "evaluate_seconds" ? "evaluate" : name, number: true }))];
    const ranges = scales(runs.flatMap((other) => other.evaluations).filter((line) => line.set === set));
    const rows = lines.map((line) => [count(line.step), ...keys.map((key) => cell(line, key, ranges))]);
    const name = [many ? run.name : null, set].filter((one) => one !== null && one !== undefined).join(": ");
    return table(name ? `Evaluations of ${name}` : "Evaluations", columns, rows, { hidden: !many && sets.length === 1 });
  });
}

/** Quantity, such as accuracy -> [lowest, highest] end of its intervals: a loss and an accuracy share no scale. */
function scales(lines) {
  const ranges = new Map();
  for (const [key, end] of lines.flatMap(Object.entries)) {
    const quantity = ENDS.exec(key)?.[1];
    if (!quantity || typeof end !== "number") continue;
    const [low, high] = ranges.get(quantity) ?? [end, end];
    ranges.set(quantity, [Math.min(low, end), Math.max(high, end)]);
  }
  return ranges;
}

function cell(line, key, ranges) {
  const value = line[key];
  if (typeof value !== "number") return "–";
  const [quantity, ...by] = key.split("/");
  const [low, high] = ["low", "high"].map((end) => line[[`${quantity}_${end}`, ...by].join("/")]);
  if (typeof low !== "number" || typeof high !== "number") {
    if (key === "evaluate_seconds") return seconds(value);
    return Number.isInteger(value) ? count(value) : fixed(value, 3);
  }
  return h("span", { className: "interval" }, bar(low, value, high, ranges.get(quantity)), fixed(value, 3), h("span", { className: "quiet" }, ` ${fixed(low, 3)}–${fixed(high, 3)}`));
}

function bar(low, value, high, [from, to]) {
  const x = (at) => 3 + (54 * (at - from)) / (to - from || 1);
  return svg(
    "svg",
    { width: 60, height: 10, "aria-hidden": "true" },
    svg("path", { class: "grid", d: "M2 5H58" }),
    svg("path", { class: "whisker", d: `M${x(low)} 5H${x(high)}` }),
    svg("circle", { class: "dot still c0", cx: x(value), cy: 5, r: 2.5 }),
  );
}

/** What happened, in the order of time; equal lines but for their numbers once, with how often. */
export class Events {
  constructor(store, view) {
    Object.assign(this, { store, view });
    this.all = false;
    this.list = h("div", {});
    this.filter = h("span", {});
    this.element = h("div", {}, h("div", { className: "tools" }, this.filter), this.list);
    store.listen((kinds) => (kinds.has("events") || kinds.has("reset") ? this.update() : 0));
    view.listen(["event"], () => this.update());
  }

  update() {
    const events = this.store.runs.flatMap((run) => run.events.map((event) => ({ run, event })));
    events.sort((a, b) => plain(a.event.time).localeCompare(plain(b.event.time)));
    const kinds = [...new Set(events.map(({ event }) => plain(event.event)))];
    const chosen = kinds.includes(this.view.get("event")) ? this.view.get("event") : "";
    const select = choice([["", `all (${events.length})`], ...kinds.map((kind) => [kind, kind])], chosen, (kind) => this.view.set({ event: kind }));
    this.filter.replaceChildren(field("Kind", select));
    const wanted = events.filter(({ event }) => !chosen || event.event === chosen);
    const rows = together(wanted);
    const shown = this.all ? rows : rows.slice(0, SHOWN);
    const { many } = this.store;
    const columns = [{ name: "time" }, ...(many ? [{ name: "run" }] : []), { name: "event" }, { name: "what happened" }];
    const cells = shown.map(({ run, event, all }) => [
      h("time", { dateTime: plain(event.time) }, plain(event.time).slice(0, 19).replace("T", " ")),
      ...(many ? [h("span", { className: `run-name c${run.number}` }, run.name)] : []),
      h("span", { className: LOUD.has(event.event) ? "kind loud" : "kind" }, plain(event.event) + (all.length > 1 ? ` ×${all.length}` : "")),
      all.length > 1 ? listed(all) : described(event),
    ]);
    const rest = rows.length - shown.length;
    this.list.replaceChildren(
      events.length ? table("Events", columns, cells, { hidden: true }) : h("p", { className: "quiet" }, "Nothing was recorded."),
      rest ? h("button", { type: "button", click: () => ((this.all = true), this.update()) }, `Show ${rest} more`) : "",
    );
  }
}

function together(events) {
  const found = [];
  const kindOf = ({ run, event }) => `${run.number} ${plain(event.event)} ${plain(event.message).replace(/\d+/g, "#")}`;
  for (const one of events) {
    const before = found[found.length - 1];
    if (before && !TOLD_APART.has(one.event.event) && kindOf(before) === kindOf(one)) before.all.push(one.event);
    else found.push({ ...one, all: [one.event] });
  }
  return found;
}

function listed(events) {
  const lines = events.map((event) => `${plain(event.time).slice(11, 19)} ${event.step === undefined ? "" : `step ${plain(event.step)}: `}${plain(event.message)}`);
  return h("details", {}, h("summary", {}, `${plain(events[0].message)}, and so on`), h("pre", {}, lines.join("\n")));
}

function described(event) {
  const more = Object.entries(event).filter(([key]) => !["time", "event", "message"].includes(key));
  const text = plain(event.message);
  if (!more.length) return text;
  return h("details", {}, h("summary", {}, text || "…"), h("pre", {}, more.map(([key, value]) => `${key}: ${plain(value)}`).join("\n")));
}

/** One run's recipe, key by key; of several runs what differs. */
export class Recipes {
  constructor(store, view, differences) {
    Object.assign(this, { store, view, differences });
    this.search = searchBox(view, "key", "learner.lr");
    this.whole = h("div", {});
    this.every = h("details", { open: view.get("key") !== "" }, h("summary", {}, "Every key, resolved"), h("div", { className: "tools" }, field("Find a key", this.search)), this.whole);
    this.element = h("div", {});
    store.listen((kinds) => (kinds.has("run") ? this.draw() : 0));
    view.listen(["key"], () => this.update());
  }

  draw() {
    const { many, runs } = this.store;
    const columns = [{ name: "key" }, ...runs.map((run) => ({ name: run.name }))];
    const rows = this.differences.map(([key, ...values]) => [h("code", {}, key), ...runs.map((run) => shown(values[run.number]))]);
    this.element.replaceChildren(
      many ? h("h3", {}, "What differs") : "",
      many ? (rows.length ? table("Differences of the recipes", columns, rows, { hidden: true }) : h("p", { className: "quiet" }, "The recipes are equal.")) : "",
      this.every,
    );
    this.update();
  }

  update() {
    const flats = this.store.runs.map((run) => flat({ ...run.about.recipe, versions: run.about.versions ?? {} }));
    const keys = [...new Set(flats.flatMap((one) => [...one.keys()]))].filter((key) => key.toLowerCase().includes(this.view.get("key").trim().toLowerCase()));
    const columns = [{ name: "key" }, ...this.store.runs.map((run) => ({ name: run.name }))];
    this.whole.replaceChildren(table("Resolved recipe", columns, keys.map((key) => [h("code", {}, key), ...flats.map((one) => shown(one.get(key)))]), { hidden: true }));
  }
}

function shown(value) {
  if (value === null || value === undefined) return h("span", { className: "quiet" }, "–");
  return h("code", { className: "wraps" }, plain(value));
}

function flat(value, place = "", found = new Map()) {
  if (value && typeof value === "object" && Object.keys(value).length) {
    for (const [key, inner] of Object.entries(value)) flat(inner, place ? `${place}.${key}` : key, found);
  } else found.set(place, value);
  return found;
}
