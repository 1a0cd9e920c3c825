// A line chart in SVG: raw values faint, the smoothed curve on top, one cursor for all charts.

import { h, svg } from "./dom.js";
import { extent, labels, last, nearest, smooth, thin, ticks } from "./series.js";

const HEIGHT = 148;
const LEFT = 52;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 20;

/** The x at which every chart shows its values; null: none. */
export class Cursor {
  constructor() {
    this.x = null;
    this.charts = new Set();
  }

  move(x) {
    this.x = x;
    for (const chart of this.charts) chart.point(x);
  }
}

/** A figure. `read()` gives {series, references, marks, weight, log, xName}; series are
 * {name, colour, xs, ys, low, high, dashed, measured}, `measured` being few points that are not
 * smoothed; `format` makes text of a value, also at the axis with `byFormat`, which is for bytes. */
export class Chart {
  constructor({ title, about, format, cursor, read, byFormat = false }) {
    Object.assign(this, { title, format, cursor, read, byFormat });
    this.readout = h("span", { className: "readout" });
    this.plot = h("div", { className: "plot", role: "slider", tabIndex: 0, "aria-label": title });
    this.element = h(
      "figure",
      { className: "chart" },
      h("figcaption", {}, h("span", { className: "name" }, title), this.readout),
      this.plot,
      about ? h("p", { className: "about" }, about) : null,
    );
    this.plot.addEventListener("pointermove", (event) => this.#hover(event));
    this.plot.addEventListener("pointerleave", () => cursor.move(null));
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    this.plot.addEventListener("blur", () => cursor.move(null));
    this.visible = false;
    this.width = 0;
    new ResizeObserver(() => this.visible && this.plot.clientWidth !== this.width && this.draw()).observe(this.plot);
    new IntersectionObserver(([entry]) => this.#seen(entry.isIntersecting), {
      rootMargin: "200px",
    }).observe(this.element);
    addEventListener("beforeprint", () => this.stale !== false && this.draw());
    cursor.charts.add(this);
  }

  /** Draws anew, now where it can be seen, else when it comes into view. */
  refresh() {
    this.stale = true;
    if (this.visible) this.draw();
  }

  #seen(visible) {
    this.visible = visible;
    if (visible && this.stale !== false) this.draw();
  }

  draw() {
    this.stale = false;
    this.width = this.plot.clientWidth;
    if (!this.width) return;
    const data = this.read();
    const series = data.series.map((one) => ({
      ...one,
      shown: data.weight && !one.measured ? smooth(one.ys, data.weight) : one.ys,
    }));
    this.series = series;
    this.xName = data.xName;
    const all = series.flatMap((one) => [one.ys, one.low ?? [], one.high ?? []]);
    const references = data.references ?? [];
    this.log = data.log && all.every((list) => list.every((value) => !(value <= 0)));
    const scaled = (value) => (this.log ? Math.log10(value) : value);
    let [low, high] = extent([...all, references.map((one) => one.value)].map((l) => l.map(scaled)));
    if (data.fromZero) low = 0;
    else if (!this.log && all.every((list) => list.every((value) => !(value < 0)))) low = Math.max(0, low);
    this.domain = extentOf(series);
    const [from, to] = this.domain;
    const inner = this.width - LEFT - RIGHT;
    const depth = HEIGHT - TOP - BOTTOM;
    this.px = (x) => LEFT + (inner * (x - from)) / (to - from || 1);
    this.py = (y) => TOP + depth * (1 - (scaled(y) - low) / (high - low));
    const root = svg("svg", { width: this.width, height: HEIGHT, "aria-hidden": "true" });
    this.#grid(root, low, high);
    for (const x of data.marks ?? []) {
      if (x > from && x < to) root.append(svg("path", { class: "resume", d: `M${this.px(x)} ${TOP}v${depth}` }));
    }
    for (const one of references) this.#reference(root, one);
    for (const one of series) this.#line(root, one, Boolean(data.weight));
    this.needle = svg("path", { class: "needle" });
    this.dots = series.map((one) => svg("circle", { class: `dot c${one.colour}`, r: 3 }));
    root.append(this.needle, ...this.dots);
    this.plot.replaceChildren(root);
    this.plot.setAttribute("aria-valuemin", from);
    this.plot.setAttribute("aria-valuemax", to);
    this.point(this.cursor.x);
  }

  #grid(root, low, high) {
    const [from, to] = this.domain;
    const unit = this.byFormat ? 1024 ** Math.floor(Math.log(Math.max(high, 1)) / Math.log(1024)) : 1; // bytes
    const ys = ticks(low / unit, high / unit, 3).map((y) => y * unit);
    const names = this.log || this.byFormat ? ys.map((y) => this.format(this.log ? 10 ** y : y)) : labels(ys);
    ys.forEach((y, i) => {
      const at = this.py(this.log ? 10 ** y : y);
      root.append(
        svg("path", { class: "grid", d: `M${LEFT} ${at}H${this.width - RIGHT}` }),
        svg("text", { class: "tick", x: LEFT - 6, y: at + 3.5, "text-anchor": "end" }, names[i]),
      );
    });
    const xs = ticks(from, to, Math.max(2, Math.floor(this.width / 90)));
    labels(xs).forEach((name, i) => {
      const at = this.px(xs[i]);
      root.append(
        svg("path", { class: "grid", d: `M${at} ${HEIGHT - BOTTOM}v3` }),
        svg("text", { class: "tick", x: at, y: HEIGHT - 5, "text-anchor": "middle" }, name),
      );
    });
  }

  #reference(root, one) {
    const at = this.py(one.value);
    root.append(
      svg("path", { class: "reference", d: `M${LEFT} ${at}H${this.width - RIGHT}` }),
      svg("text", { class: "tick", x: this.width - RIGHT, y: at - 4, "text-anchor": "end" }, one.name),
    );
  }

  #line(root, one, smoothed) {
    const path = (ys) => {
      let d = "";
      for (const i of thin(ys, this.width * 2)) {
        if (Number.isNaN(ys[i])) continue;
        d += `${d ? "L" : "M"}${this.px(one.xs[i]).toFixed(1)} ${this.py(ys[i]).toFixed(1)}`;
      }
      return d;
    };
    const colour = `c${one.colour}`;
    if (one.low) {
      const back = one.xs.map((_, i) => one.xs.length - 1 - i);
      const at = (i, ys) => `${this.px(one.xs[i]).toFixed(1)} ${this.py(ys[i]).toFixed(1)}`;
      const there = one.xs.map((_, i) => at(i, one.low)).join("L");
      const again = back.map((i) => at(i, one.high)).join("L");
      if (one.xs.length > 1) root.append(svg("path", { class: `band ${colour}`, d: `M${there}L${again}Z` }));
    }
    one.ys.forEach((y, i) => {
      if (one.measured && !Number.isNaN(y)) root.append(svg("circle", { class: `dot still ${colour}`, r: 2, cx: this.px(one.xs[i]), cy: this.py(y) }));
    });
    if (smoothed && !one.measured && !one.dashed) root.append(svg("path", { class: `raw ${colour}`, d: path(one.ys) }));
    root.append(svg("path", { class: `line ${colour}${one.dashed ? " dashed" : ""}`, d: path(one.shown) }));
  }

  #hover(event) {
    if (!this.domain) return;
    const box = this.plot.getBoundingClientRect();
    const [from, to] = this.domain;
    const part = (event.clientX - box.left - LEFT) / (this.width - LEFT - RIGHT);
    this.cursor.move(Math.min(to, Math.max(from, from + part * (to - from))));
  }

  #key(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 }[event.key];
    const xs = this.series?.[0]?.xs;
    if (!xs?.length || (!way && event.key !== "Home" && event.key !== "End")) return;
    event.preventDefault();
    const at = this.cursor.x === null ? xs.length - 1 : nearest(xs, this.cursor.x);
    const to = event.key === "Home" ? 0 : event.key === "End" ? xs.length - 1 : at + way;
    this.cursor.move(xs[Math.min(xs.length - 1, Math.max(0, to))]);
  }

  /** Shows the values at x, or the last ones. */
  point(x) {
    if (!this.series || !this.visible) return;
    const many = this.series.length > 1;
    const parts = [];
    let place = null;
    this.series.forEach((one, n) => {
      const known = x !== null && one.xs.length > 0;
      const i = known ? nearest(one.xs, x) : -1;
      const value = known ? one.ys[i] : last(one.ys);
      if (known) place = one.xs[i];
      const shown = known && !Number.isNaN(value);
      this.dots[n].setAttribute("visibility", shown ? "visible" : "hidden");
      if (shown) {
        this.dots[n].setAttribute("cx", this.px(one.xs[i]));
        this.dots[n].setAttribute("cy", this.py(one.shown[i]));
      }
      const band = one.low && known ? ` [${this.format(one.low[i])}, ${this.format(one.high[i])}]` : "";
      parts.push({ colour: one.colour, dashed: one.dashed, text: this.format(value) + band, name: one.name });
    });
    this.needle.setAttribute("d", place === null ? "" : `M${this.px(place)} ${TOP}v${HEIGHT - TOP - BOTTOM}`);
    const at = place === null ? "" : `${this.xName === "seconds" ? `${Math.round(place)} s` : `step ${place}`}  `;
    this.readout.replaceChildren(
      ...(at ? [h("span", { className: "at" }, at)] : []),
      ...parts.map((one) =>
        h("span", { className: many ? `value c${one.colour}${one.dashed ? " dashed" : ""}` : "value" }, one.text),
      ),
    );
    const said = parts.map((one) => (many ? `${one.name} ${one.text}` : one.text)).join(", ");
    this.plot.setAttribute("aria-valuenow", place ?? this.domain[1]);
    this.plot.setAttribute("aria-valuetext", `${at || "last: "}${said}`);
  }
}

function extentOf(series) {
  let from = Infinity;
  let to = -Infinity;
  for (const { xs } of series) {
    if (!xs.length) continue;
    from = Math.min(from, xs[0]);
    to = Math.max(to, xs[xs.length - 1]);
  }
  if (from > to) return [0, 1];
  return from === to ? [from - 0.5, to + 0.5] : [from, to];
}
