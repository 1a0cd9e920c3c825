// What is known of the runs. Messages of Python (observe/report/run.py) come in, views read.

const PHASE = /^[a-z]+_seconds$/;

/** One run: recipe, lines of its logs, samples as flat rows. */
export class Run {
  constructor(number) {
    this.number = number;
    this.name = `run ${number + 1}`;
    this.about = {};
    this.forget();
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

  get steps() {
    return this.metrics.length ? this.metrics[this.metrics.length - 1].step : 0;
  }

  get planned() {
    const batch = this.about.plan?.batch?.steps;
    return this.about.recipe?.steps ?? batch ?? null;
  }
}

/** All runs of the page, and who wants to hear of changes. */
export class Store {
  constructor(runs) {
    this.runs = Array.from({ length: runs }, (_, number) => new Run(number));
    this.listeners = [];
  }

  /** `heard(kinds)` is called after messages of these kinds came in. */
  listen(heard) {
    this.listeners.push(heard);
  }

  add(messages) {
    const kinds = new Set();
    for (const message of messages) {
      kinds.add(message.kind);
      take(this.runs[message.run], message);
    }
    if (kinds.size) for (const heard of this.listeners) heard(kinds);
  }
}

function take(run, message) {
  if (message.kind === "reset") run.forget();
  else if (message.kind === "run") {
    run.about = message;
    run.name = message.name;
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
