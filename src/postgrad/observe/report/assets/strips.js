// Distributions over the steps as heat strips: a column a step, darker where more samples are.

import { h, svg } from "./dom.js";
import { counted, number, percent } from "./format.js";
import { extentOf, Plot } from "./plot.js";
import { extent, nearest } from "./series.js";

const BINS = 24;
const NARROWEST = 4; // pixels of a column
const AGE = /^staleness\/age_(\d+)$/;

/** read() gives {columns, range, marks, xName, colour}; a column is {x, parts, of}, its parts being
 * [low, high, weight], spread evenly; range(domain) gives {low, high, bins}, the same for all runs. */
export class Strip extends Plot {
  take(data) {
    this.columns = data.columns;
    const xs = data.columns.map((one) => one.x);
    this.half = xs.length > 1 ? xs.reduce((least, x, i) => (i ? Math.min(least, x - xs[i - 1]) : least), Infinity) / 2 : 0.5;
    const [from, to] = extentOf([xs]);
    return xs.length > 1 ? [from - this.half, to + this.half] : [from, to];
  }

  span(domain) {
    this.bins = this.data.range(domain);
    return [this.bins.low, this.bins.high];
  }

  places() {
    return this.columns.map((one) => one.x);
  }

  paint(root) {
    const [from, to] = this.domain;
    const inside = this.columns.filter((one) => one.x + this.half > from && one.x - this.half < to);
    const together = Math.max(1, Math.ceil((inside.length * NARROWEST) / this.inner.width));
    const stripes = [];
    for (let i = 0; i < inside.length; i += together) stripes.push(this.#stripe(inside.slice(i, i + together)));
    const most = Math.max(...stripes.flatMap((one) => one.shares), 1e-9);
    const { low, high, bins } = this.bins;
    const edge = (bin) => this.py(low + ((high - low) * bin) / bins);
    for (const { left, right, shares } of stripes) {
      shares.forEach((share, bin) => {
        if (!share) return;
        const y = edge(bin + 1);
        root.append(svg("rect", { class: `cell c${this.data.colour}`, x: left, width: Math.max(1, right - left), y, height: edge(bin) - y + 0.3, "fill-opacity": (0.08 + 0.92 * Math.sqrt(share / most)).toFixed(3) }));
      });
    }
    const points = stripes.filter((one) => one.median !== null && !this.data.shares).map((one) => `${((one.left + one.right) / 2).toFixed(1)} ${this.py(one.median).toFixed(1)}`);
    if (points.length > 1) root.append(svg("path", { class: "median", d: `M${points.join("L")}` }));
  }

  #stripe(columns) {
    const parts = columns.flatMap((one) => one.parts);
    return {
      left: this.px(columns[0].x - this.half),
      right: this.px(columns[columns.length - 1].x + this.half),
      shares: binned(parts, this.bins),
      median: quantile(parts, 0.5),
    };
  }

  show(x) {
    const { columns } = this;
    const at = columns.length && x !== null ? columns[nearest(this.places(), x)] : null;
    const column = at ?? columns[columns.length - 1];
    if (!column) return { place: null, parts: [] };
    const [low, middle, high] = [0.1, 0.5, 0.9].map((part) => this.format(quantile(column.parts, part)));
    const text = column.told ?? `${middle} (${low} to ${high}), ${column.of}`;
    return { place: at ? at.x : null, parts: [{ colour: this.data.colour, text, name: "" }] };
  }
}

/** The share of the weight in each bin. */
export function binned(parts, { low, high, bins }) {
  const counts = new Array(bins).fill(0);
  const width = (high - low) / bins;
  const place = (value) => Math.min(bins - 1, Math.max(0, Math.floor((value - low) / width)));
  let sum = 0;
  for (const [from, to, weight] of parts) {
    sum += weight;
    const [first, last] = [place(from), place(to)];
    if (first === last) counts[first] += weight;
    for (let bin = first; first !== last && bin <= last; bin += 1) {
      const left = bin === first ? from : low + bin * width;
      const right = bin === last ? to : low + (bin + 1) * width;
      counts[bin] += (weight * Math.max(0, right - left)) / (to - from);
    }
  }
  return sum ? counts.map((one) => one / sum) : counts;
}

/** The value below which a part of the weight lies; null without any. */
export function quantile(parts, part) {
  const sorted = parts.filter((one) => one[2] > 0).sort((a, b) => a[0] + a[1] - b[0] - b[1]);
  const sum = sorted.reduce((all, one) => all + one[2], 0);
  let below = 0;
  for (const [low, high, weight] of sorted) {
    if (below + weight >= part * sum - 1e-12) return low + (high - low) * Math.max(0, Math.min(1, (part * sum - below) / weight));
    below += weight;
  }
  return null;
}

/** Bins that hold all parts of the columns within a domain: one a whole number where they are few
 * whole numbers. */
function rangeOf(lists) {
  return ([from, to]) => {
    const seen = lists.flat().filter((one) => one.x >= from && one.x <= to);
    const parts = (seen.length ? seen : lists.flat()).flatMap((one) => one.parts);
    let [low, high] = [Infinity, -Infinity];
    let whole = true;
    for (const [a, b] of parts) {
      low = Math.min(low, a);
      high = Math.max(high, b);
      whole &&= a === b && Number.isInteger(a);
    }
    if (whole && high - low < BINS && low <= high) return { low: low - 0.5, high: high + 0.5, bins: high - low + 1 };
    if (low >= high || low === Infinity) [low, high] = extent([parts.map((one) => one[0])]);
    return { low, high, bins: BINS };
  };
}

/** Columns of a value of the samples that were drawn in training, by step. */
function sampled(run, value) {
  const steps = new Map();
  for (const row of run.rows) {
    const at = row.group.evaluated ? null : value(row);
    if (typeof at !== "number") continue;
    if (!steps.has(row.group.step)) steps.set(row.group.step, []);
    steps.get(row.group.step).push([at, at, 1]);
  }
  return [...steps].sort(([a], [b]) => a - b).map(([x, parts]) => ({ x, parts, of: counted(parts.length, "sample") }));
}

/** Columns of the margins of held-out pairs, an evaluation each. */
function margins(run, set) {
  return run.evaluations.filter((line) => line.set === set && Array.isArray(line.margin_histogram?.counts)).flatMap((line) => {
    const { edges, counts } = line.margin_histogram;
    const parts = counts.map((weight, i) => [edges[i], edges[i + 1], weight]).filter((one) => one.every((value) => typeof value === "number"));
    return parts.length ? [{ x: line.step, parts, of: counted(parts.reduce((sum, one) => sum + one[2], 0), "pair") }] : [];
  });
}

/** Columns of the ages of tokens that were trained on, in steps. */
function ages(run) {
  const names = run.names().filter((name) => AGE.test(name));
  const steps = run.column("step");
  return steps.map((x, i) => {
    const parts = names.map((name) => [Number(AGE.exec(name)[1]), run.column(name)[i]]).filter(([, share]) => share > 0);
    const told = parts.map(([age, share]) => `${percent(share)} of age ${age}`).join(", ");
    return { x, told: told || "no token", parts: parts.map(([age, share]) => [age, age, share]) };
  }).filter((one) => one.parts.length);
}

const KINDS = [
  { name: "reward of each sample", key: "reward", columns: (run) => sampled(run, (row) => row.total), thinned: true },
  { name: "tokens of each response", key: "length", columns: (run) => sampled(run, (row) => row.tokens), thinned: true },
  { name: "age of the tokens, in steps", key: "staleness", columns: ages, shares: true },
];

/** The section: small multiples, a strip for each distribution and run, one scale for all runs. */
export class Strips {
  constructor(store, cursor) {
    Object.assign(this, { store, cursor });
    this.strips = new Map();
    this.grid = h("div", { className: "charts" });
    this.hint = h("p", { className: "quiet hint" }, "A column a step, darker where more samples are. The line is the median; the numbers are the median and the middle 80%.");
    this.none = h("p", { className: "quiet" }, "No distribution was recorded: they are made of the samples of RL, and of evaluations on pairs.");
    this.element = h("div", {}, this.hint, this.grid, this.none);
    this.update();
    store.listen((told) => (["groups", "metrics", "evaluations", "reset", "counts"].some((kind) => told.has(kind)) ? this.update() : 0));
  }

  update() {
    const { runs } = this.store;
    const sets = [...new Set(this.store.all.flatMap((run) => run.evaluations.filter((line) => line.margin_histogram).map((line) => line.set)))];
    const kinds = [...KINDS, ...sets.map((set) => ({ name: `margin of each held-out pair${set === null ? "" : `, ${set}`}`, key: `margin ${set}`, columns: (run) => margins(run, set) }))];
    const elements = [];
    for (const kind of kinds) {
      const lists = new Map(runs.map((run) => [run, kind.columns(run)]).filter(([, columns]) => columns.length > 1));
      const range = rangeOf([...lists.values()]);
      for (const [run, columns] of lists) elements.push(this.#strip(kind, run, { columns, range }).element);
    }
    this.none.hidden = elements.length > 0;
    this.hint.hidden = !elements.length;
    if (elements.length !== this.grid.children.length || elements.some((one, i) => this.grid.children[i] !== one)) this.grid.replaceChildren(...elements);
  }

  #strip(kind, run, data) {
    const key = `${kind.key} of run ${run.number}`;
    const title = this.store.many ? `${kind.name}: ${run.name}` : kind.name;
    let strip = this.strips.get(key);
    if (strip?.options.title !== title) {
      if (strip) this.cursor.plots.delete(strip);
      strip = new Strip({ title, about: kind.thinned ? thinned(run) : undefined, format: number, cursor: this.cursor, kind: this.store.many ? `c${run.number}` : "", read: () => strip.latest }, key);
      this.strips.set(key, strip);
    }
    strip.latest = { ...data, shares: kind.shares, marks: run.resumes(), xName: "step", colour: run.number };
    strip.refresh();
    return strip;
  }
}

function thinned(run) {
  const { samples, shown } = run.counts;
  return shown < samples ? `of the samples on this page, ${percent(shown / samples)} of all` : undefined;
}
