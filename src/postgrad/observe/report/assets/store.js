// What is known of the runs. Messages of Python (observe/report/run.py) come in, views read.

const PHASE = /^[a-z]+_seconds$/;
const LONGEST_NAME = 60; // characters
const KINDS = ["run", "metrics", "evaluations", "events", "groups", "counts", "reset"];

/** One run: recipe, lines of its logs, samples as flat rows. */
export class Run {
  constructor(number) {
    this.number = number;
    this.ownName = `run ${number + 1}`;
    this.given = "";
    this.about = {};
    this.forget();
  }

  get name() {
    return this.given || this.ownName;
  }

  forget() {
    this.metrics = [];
    this.evaluations = [];
    this.events = [];
    this.rows = [];
    this.counts = { samples: 0, shown: 0 };
    this.troubles = [];
    this.columns = new Map();
  }

  /** Steps or seconds so far, one a metric line. */
  axis(name) {
    if (name !== "seconds") return this.column("step");
    let sum = 0;
    return this.metrics.map((line) => {
      for (const [key, value] of Object.entries(line)) if (PHASE.test(key)) sum += value ?? 0;
      return sum;
    });
  }

  /** The values of a metric, NaN where a line has none. */
  column(name) {
    let found = this.columns.get(name);
    if (!found) this.columns.set(name, (found = []));
    for (let i = found.length; i < this.metrics.length; i += 1) {
      const value = this.metrics[i][name];
      found.push(typeof value === "number" ? value : NaN);
    }
    return found;
  }

  /** Every name that a metric line has, in the order of the lines. */
  names() {
    const found = new Set();
    for (const line of this.metrics) for (const key of Object.keys(line)) found.add(key);
    return [...found];
  }

  /** Steps at which the run was taken up again. */
  resumes() {
    return this.events.filter((one) => one.event === "resumed").map((one) => one.step ?? 0);
  }

  /** The event that tells of which run and step this one is a fork; undefined of any other run. */
  get forked() {
    return this.events.findLast((one) => one.event === "forked");
  }

  get steps() {
    return this.metrics.length ? this.metrics[this.metrics.length - 1].step : 0;
  }

  get finished() {
    return this.about.summary?.steps === this.steps;
  }

  get planned() {
    const batch = this.about.plan?.batch?.steps;
    return this.about.recipe?.steps ?? batch ?? null;
  }
}

/** All runs of the page, and who wants to hear of changes. The view hides and renames runs. */
export class Store {
  constructor(runs, view) {
    this.view = view;
    this.all = Array.from({ length: runs }, (_, number) => new Run(number));
    this.listeners = [];
    this.#chosen();
    view.listen(["hide", "name*"], () => {
      this.#chosen();
      this.#tell(new Set([...KINDS, "chosen"]));
    });
  }

  /** Several runs are told apart by name and colour, even where only one is shown. */
  get many() {
    return this.all.length > 1;
  }

  /** Hides a run or shows it again; the last one that is shown stays. */
  hide(run, hidden) {
    const others = this.all.filter((one) => one !== run && !this.runs.includes(one));
    const now = hidden ? [...others, run] : others;
    if (now.length < this.all.length) this.view.set({ hide: now.map((one) => one.number).sort((a, b) => a - b).join(",") });
  }

  rename(run, name) {
    const text = name.trim().slice(0, LONGEST_NAME);
    this.view.set({ [`name${run.number}`]: text === run.ownName ? null : text });
  }

  #chosen() {
    const hidden = new Set(this.view.get("hide").split(",").filter(Boolean).map(Number));
    const shown = this.all.filter((run) => !hidden.has(run.number));
    this.runs = shown.length ? shown : this.all;
    for (const run of this.all) run.given = this.view.get(`name${run.number}`).slice(0, LONGEST_NAME);
  }

  #tell(kinds) {
    for (const heard of this.listeners) heard(kinds);
  }

  /** `heard(kinds)` is called after messages of these kinds came in. */
  listen(heard) {
    this.listeners.push(heard);
  }

  add(messages) {
    const kinds = new Set();
    for (const message of messages) {
      kinds.add(message.kind);
      take(this.all[message.run], message);
    }
    if (kinds.size) this.#tell(kinds);
  }
}

function take(run, message) {
  if (message.kind === "reset") run.forget();
  else if (message.kind === "run") {
    run.about = message;
    run.ownName = message.name;
  } else if (message.kind === "counts") run.counts = message;
  else if (message.kind === "trouble") run.troubles.push(message.message);
  else if (message.kind === "groups") for (const group of message.groups) flatten(run, group);
  else run[message.kind].push(...message.lines);
}

function flatten(run, group) {
  const { samples, ...shared } = group;
  shared.key = `${shared.dataset}\n${shared.row}`;
  shared.first = run.rows.length;
  shared.size = samples.length;
  for (const sample of samples) {
    sample.group = shared;
    sample.run = run.number;
    run.rows.push(sample);
  }
}
