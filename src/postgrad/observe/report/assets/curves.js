// The curves: a chart for each metric that moves, by what they tell.

import { choice, field, h, searchBox, table } from "./dom.js";
import { ENDS, measured } from "./format.js";
import { Chart } from "./chart.js";
import { last, moves, nearest } from "./series.js";

const GROUPS = [
  ["Result", /^(reward$|reward\/|eval\/|loss$|policy\/(accuracy|reward_margin)$|reward_model\/(accuracy|margin)$)/],
  ["Policy", /^((policy|kl|reference)\/|sampled_entropy$)/],
  ["Critic and reward model", /^(critic|reward_model|reward_scaling)\//],
  ["Responses and groups", /^(response_|truncated|dead_end|samples$|dropped|failures$|groups\/|masked_samples$|updates\/|sampling\/|environment\/|on_policy\/|curriculum\/|loss_tokens$|failed_fraction$|best_reward_|commonest_)/],
  ["Samples ahead", /^(staleness|ahead|overlap|idle)\/|^publish\/sent_bytes$/],
  ["Speed", /_per_second$|_time_fraction$/],
  ["Sentinels", /^sentinel\//],
  ["Other", /./],
];
const FIRST = [
  "reward", "eval/accuracy", "eval/greedy_accuracy", "eval/loss", "loss", "policy/entropy", "policy/kl",
  "policy/logprob", "policy/grad_norm", "policy/ratio", "policy/clip_fraction", "response_length",
];
const ABOUT = {
  reward: "mean of kept samples, filtered groups included",
  loss: "mean over the step's updates",
  "policy/entropy": "nats a token",
  sampled_entropy: "nats a token: mean −log p of the sampled tokens",
  "policy/ratio": "new over old probability, mean over tokens",
  "policy/grad_norm": "before clipping",
  "policy/logprob": "of the sampled tokens, mean in nats",
  "groups/equal_fraction": "share of groups whose rewards are all equal: they have no gradient",
  "groups/reward_std": "mean deviation of rewards within a group",
  truncated_fraction: "share that hit the token limit, or a dead end of their grammar",
  response_length: "tokens, mean",
  "staleness/mean": "age in steps of the tokens trained on",
  "idle/learner_time_fraction": "share of the step in which the learner does not learn",
  "idle/engines_time_fraction": "share of the step in which an engine has nothing to do, mean over engines",
  "idle/empty_rows_fraction": "share of the rows of decode steps in which no sample was",
  "publish/sent_bytes": "that each engine got",
  "sentinel/prob_difference": "learner against sampler on the same tokens",
  "sentinel/publish_difference": "engine against learner after a publish, nats",
  "sentinel/policy_moved": "how far a step moved the policy, nats",
};
const ELSEWHERE = /^(step|update|episodes)$|^(?!reward\/).*(_seconds|_(memory|reserved)_bytes)$|^estimated\//;
const WEIGHT = 0.6; // of the moving average, unless a person chooses another
const HEAVIEST = 0.98;
const HINTS = [["+", "−", "0"], " zoom, ", ["←", "→"], " move, ", ["Enter"], " samples."].flatMap((part) =>
  Array.isArray(part) ? part.map((key) => h("kbd", {}, key)) : [part],
);
const NOT_CURVES = new Set(["step", "update", "set", "rows", "failed", "evaluate_seconds"]);

export class Curves {
  constructor(store, cursor, view) {
    Object.assign(this, { store, cursor, view });
    this.charts = new Map();
    this.body = h("div", {});
    this.element = h("div", {}, this.#tools(), this.body);
    const kinds = ["metrics", "evaluations", "reset", "events"];
    store.listen((told) => (kinds.some((kind) => told.has(kind)) ? this.update() : 0));
    view.listen(["metric"], () => this.update());
  }

  get weight() {
    const weight = this.view.number("smooth");
    return weight >= 0 && weight <= HEAVIEST ? weight : WEIGHT;
  }

  #tools() {
    const { view } = this;
    const slider = h("input", { type: "range", min: 0, max: HEAVIEST, step: 0.02 });
    slider.addEventListener("input", () => view.set({ smooth: slider.value }));
    const log = h("input", { type: "checkbox", change: () => view.set({ log: log.checked ? 1 : null }) });
    const axis = choice([["", "steps"], ["seconds", "seconds of the run"]], "", (value) => view.set({ over: value, zoom: null }));
    const show = () => {
      slider.value = this.weight;
      log.checked = view.get("log") !== "";
      axis.value = view.get("over") === "seconds" ? "seconds" : "";
    };
    show();
    view.listen(["smooth", "log", "over", "zoom"], () => {
      show();
      this.cursor.refresh();
    });
    return h(
      "div",
      {},
      h(
        "div",
        { className: "tools" },
        field("Smooth", slider),
        field("Over", axis),
        h("label", { className: "tick-box" }, log, "Log scale"),
        field("Find a metric", searchBox(view, "metric", "policy/…")),
      ),
      h("p", { className: "quiet hint" }, "Drag to zoom, click for the samples of a step. Keys: ", ...HINTS),
    );
  }

  update() {
    const names = this.#names();
    const groups = GROUPS.map(([title]) => ({ title, moving: [], still: [] }));
    for (const name of names) {
      const group = groups[GROUPS.findIndex(([, pattern]) => pattern.test(name))];
      (this.#moves(name) ? group.moving : group.still).push(name);
    }
    const shape = JSON.stringify(groups);
    if (shape !== this.shape) {
      this.shape = shape;
      const parts = groups.filter((one) => one.moving.length || one.still.length).map((one) => this.#group(one));
      this.body.replaceChildren(...(parts.length ? parts : [h("p", { className: "quiet" }, "No metric has such a name.")]), this.numbers = h("div", {}));
    }
    this.charts.forEach((chart) => chart.refresh());
    this.numbers.replaceChildren(this.#numbers(names));
  }

  #names() {
    const found = new Set();
    for (const run of this.store.all) {
      for (const name of run.names()) if (!ELSEWHERE.test(name)) found.add(name);
      for (const name of evaluated(run)) found.add(name);
    }
    const wanted = this.view.get("metric").trim().toLowerCase();
    const place = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
    return [...found].filter((name) => name.toLowerCase().includes(wanted)).sort((a, b) => place(a) - place(b));
  }

  #moves(name) {
    return this.store.all.some((run) => moves(seriesOf(run, name, "step").ys));
  }

  #group({ title, moving, still }) {
    const constants = still.map((name) => {
      const values = this.store.runs.map((run) => measured(name, last(seriesOf(run, name, "step").ys)));
      return h("span", { className: "constant" }, h("code", {}, name), ` ${[...new Set(values)].join(" | ")}`);
    });
    return h(
      "section",
      { "aria-label": title },
      h("h3", {}, title),
      h("div", { className: "charts" }, moving.map((name) => this.#chart(name).element)),
      still.length ? h("p", { className: "constants" }, h("span", { className: "quiet" }, "One value only: "), constants) : null,
    );
  }

  #chart(name) {
    let chart = this.charts.get(name);
    if (!chart) {
      const read = () => this.#data(name);
      chart = new Chart({ title: name, about: ABOUT[name], format: (v) => measured(name, v), cursor: this.cursor, read });
      this.charts.set(name, chart);
    }
    return chart;
  }

  #data(name) {
    const { runs } = this.store;
    const axis = this.cursor.zoom.axis;
    const [first] = runs;
    return {
      series: runs.flatMap((run) => {
        const own = { ...seriesOf(run, name, axis), colour: run.number, name: run.name };
        const estimated = seriesOf(run, `estimated/${name}`, axis);
        const told = estimated.ys.some((value) => !Number.isNaN(value));
        return told ? [own, { ...estimated, colour: run.number, name: "estimated", dashed: true }] : [own];
      }).filter((one) => one.xs.length),
      marks: axis === "step" ? runs.flatMap((run) => run.resumes()) : [],
      weight: this.weight,
      log: this.view.get("log") !== "",
      xName: axis,
      stepAt: (x) => (axis === "step" ? x : first.column("step")[nearest(first.axis(axis), x)]),
    };
  }

  #numbers(names) {
    const columns = ["metric", "run", "first", "last", "least", "most"].map((name, i) => ({ name, number: i > 1 }));
    const rows = names.flatMap((name) =>
      this.store.runs.flatMap((run) => {
        const known = seriesOf(run, name, "step").ys.filter((value) => !Number.isNaN(value));
        if (!known.length) return [];
        const ends = [known[0], known[known.length - 1], known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
        return [[h("code", {}, name), run.name, ...ends.map((value) => measured(name, value))]];
      }),
    );
    return h("details", {}, h("summary", {}, "All metrics in numbers"), table("First, last, least and most of every metric", columns, rows, { hidden: true }));
  }
}

/** Names "eval/accuracy" or "eval/SET/accuracy" of the curves that evaluations make. */
function evaluated(run) {
  const found = new Set();
  for (const line of run.evaluations) {
    for (const [key, value] of Object.entries(line)) {
      if (typeof value === "number" && !NOT_CURVES.has(key) && !ENDS.test(key) && !key.startsWith("rows/")) {
        found.add(line.set === null || line.set === undefined ? `eval/${key}` : `eval/${line.set}/${key}`);
      }
    }
  }
  return found;
}

/** {xs, ys} of a metric, or of an evaluation with the ends of its interval. */
function seriesOf(run, name, axis) {
  if (!name.startsWith("eval/")) return { xs: run.axis(axis), ys: run.column(name) };
  const lines = run.evaluations.flatMap((line) => {
    const start = line.set === null || line.set === undefined ? "eval/" : `eval/${line.set}/`;
    const key = name.slice(start.length);
    if (!name.startsWith(start) || typeof line[key] !== "number") return [];
    const [what, ...by] = key.split("/");
    const end = (word) => line[[`${what}_${word}`, ...by].join("/")];
    return [{ x: line.step, y: line[key], low: end("low"), high: end("high") }];
  });
  const times = axis === "seconds" ? run.axis("seconds") : null;
  const steps = run.column("step");
  const xs = lines.map(({ x }) => (times ? (times[steps.indexOf(x)] ?? 0) : x));
  const found = { xs, ys: lines.map((line) => line.y), measured: true };
  if (lines.length && lines.every((line) => typeof line.low === "number" && typeof line.high === "number")) {
    found.low = lines.map((line) => line.low);
    found.high = lines.map((line) => line.high);
  }
  return found;
}
