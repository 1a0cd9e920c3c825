// What curves and strips share: a figure with axes, one cursor for all, zoom by dragging or keys,
// a way to the samples of a step, and a large copy of itself.

import { h, svg } from "./dom.js";
import { labels, nearest, ticks } from "./series.js";

const LEFT = 52;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 20;
const DRAGGED = 6; // pixels: less is a click

/** The x at which every plot shows its values, null for none; and what all plots need. */
export class Cursor {
  /** jump(step) shows the samples of a step. */
  constructor(zoom, enlarge, jump) {
    Object.assign(this, { zoom, enlarge, jump });
    this.x = null;
    this.plots = new Set();
  }

  move(x) {
    this.x = x;
    for (const plot of this.plots) plot.point(x);
  }

  refresh() {
    for (const plot of this.plots) plot.refresh();
  }
}

/** A subclass has take(data) -> the extent of x, span(domain) -> that of y, paint(root, inner),
 * places() -> the ascending xs, and show(x) -> {place, parts}. read() gives the data with xName. */
export class Plot {
  constructor(options, key = options.title) {
    const { title, about, format, cursor, read, byFormat = false, large = false, kind = "" } = options;
    Object.assign(this, { options, key, format, cursor, read, byFormat, large });
    this.readout = h("span", { className: "readout" });
    const keys = "ArrowLeft ArrowRight + - 0 Enter";
    this.plot = h("div", { className: "plot", role: "slider", tabIndex: 0, "aria-label": large ? `${title}, enlarged` : title, "aria-keyshortcuts": keys });
    const enlarge = h("button", { type: "button", className: "icon", "aria-label": `Enlarge ${title}`, title: "Enlarge", click: () => cursor.enlarge(key) }, "⤢");
    this.element = h(
      "figure",
      { className: `chart${large ? " large" : ""}` },
      h("figcaption", {}, h("span", { className: `name ${kind}` }, title), h("span", { className: "right" }, this.readout, large ? null : enlarge)),
      this.plot,
      about ? h("p", { className: "about" }, about) : null,
    );
    this.#listen();
    this.visible = false;
    this.width = 0;
    new ResizeObserver(() => this.visible && this.plot.clientWidth !== this.width && this.draw()).observe(this.plot);
    new IntersectionObserver(([entry]) => this.#seen(entry.isIntersecting), { rootMargin: "200px" }).observe(this.element);
    addEventListener("beforeprint", () => this.stale !== false && this.draw());
    cursor.plots.add(this);
  }

  /** The same plot, larger. */
  copy() {
    return new this.constructor({ ...this.options, large: true }, `${this.key}, enlarged`);
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
    this.height = this.plot.clientHeight;
    if (!this.width) return;
    const data = this.read();
    this.data = data;
    this.whole = this.take(data);
    this.domain = this.#zoomed();
    const [low, high] = this.span(this.domain);
    const [from, to] = this.domain;
    const inner = { x: LEFT, y: TOP, width: Math.max(1, this.width - LEFT - RIGHT), height: this.height - TOP - BOTTOM };
    this.inner = inner;
    const scaled = (value) => (this.log ? Math.log10(value) : value);
    this.px = (x) => LEFT + (inner.width * (x - from)) / (to - from || 1);
    this.py = (y) => TOP + inner.height * (1 - (scaled(y) - low) / (high - low));
    const root = svg("svg", { width: this.width, height: this.height, "aria-hidden": "true" });
    this.#grid(root, low, high);
    // its own coordinates are those of the whole; what lies outside the axes is cut
    const cut = svg("svg", { class: "cut", "aria-hidden": "true", ...inner, viewBox: `${inner.x} ${inner.y} ${inner.width} ${inner.height}` });
    this.paint(cut);
    for (const x of data.marks ?? []) {
      if (x > from && x < to) cut.append(svg("path", { class: "resume", d: `M${this.px(x)} ${TOP}v${inner.height}` }));
    }
    this.needle = svg("path", { class: "needle" });
    this.selection = svg("rect", { class: "selection", y: TOP, height: inner.height, width: 0 });
    root.append(cut, this.selection, this.needle, ...this.dots());
    this.plot.replaceChildren(root);
    this.plot.setAttribute("aria-valuemin", from);
    this.plot.setAttribute("aria-valuemax", to);
    this.point(this.cursor.x);
  }

  dots() {
    return [];
  }

  #zoomed() {
    const [from, to] = this.whole;
    const range = this.cursor.zoom.range(this.data.xName);
    if (!range || range[0] >= to || range[1] <= from) return this.whole;
    return [Math.max(from, range[0]), Math.min(to, range[1])];
  }

  #grid(root, low, high) {
    const [from, to] = this.domain;
    const right = this.width - RIGHT;
    const unit = this.byFormat ? 1024 ** Math.floor(Math.log(Math.max(high, 1)) / Math.log(1024)) : 1; // bytes
    const ys = ticks(low / unit, high / unit, Math.max(3, Math.floor(this.height / 60))).map((y) => y * unit);
    const names = this.log || this.byFormat ? ys.map((y) => this.format(this.log ? 10 ** y : y)) : labels(ys);
    ys.forEach((y, i) => {
      const at = this.py(this.log ? 10 ** y : y);
      root.append(
        svg("path", { class: "grid", d: `M${LEFT} ${at}H${right}` }),
        svg("text", { class: "tick", x: LEFT - 6, y: at + 3.5, "text-anchor": "end" }, names[i]),
      );
    });
    const xs = ticks(from, to, Math.max(2, Math.floor(this.width / 90)));
    labels(xs).forEach((name, i) => {
      const at = this.px(xs[i]);
      root.append(
        svg("path", { class: "grid", d: `M${at} ${this.height - BOTTOM}v3` }),
        svg("text", { class: "tick", x: at, y: this.height - 5, "text-anchor": "middle" }, name),
      );
    });
  }

  #listen() {
    const { plot, cursor } = this;
    plot.addEventListener("pointerdown", (event) => this.#down(event));
    plot.addEventListener("pointermove", (event) => this.#hover(event));
    plot.addEventListener("pointerup", (event) => this.#up(event));
    plot.addEventListener("pointercancel", () => this.#select(null));
    plot.addEventListener("pointerleave", () => this.start === undefined && cursor.move(null));
    plot.addEventListener("dblclick", () => cursor.zoom.reset());
    plot.addEventListener("keydown", (event) => this.#key(event));
    plot.addEventListener("blur", () => cursor.move(null));
  }

  #xAt(event) {
    const { left } = this.plot.getBoundingClientRect();
    const [from, to] = this.domain;
    const part = (event.clientX - left - LEFT) / this.inner.width;
    return Math.min(to, Math.max(from, from + part * (to - from)));
  }

  #down(event) {
    // a finger moves the cursor; it zooms with the buttons of the enlarged plot
    if (!this.domain || event.button || event.pointerType === "touch") return;
    this.start = event.clientX;
    this.startX = this.#xAt(event);
    this.plot.setPointerCapture(event.pointerId);
  }

  #hover(event) {
    if (!this.domain) return;
    this.cursor.move(this.#xAt(event));
    if (this.start !== undefined && Math.abs(event.clientX - this.start) >= DRAGGED) this.#select([this.startX, this.#xAt(event)]);
  }

  #up(event) {
    if (this.start === undefined) return;
    const dragged = Math.abs(event.clientX - this.start) >= DRAGGED;
    const ends = [this.startX, this.#xAt(event)].sort((a, b) => a - b);
    this.#select(null);
    if (dragged) this.cursor.zoom.set(this.data.xName, ...ends);
    else if (event.detail < 2) this.#jump();
  }

  /** Draws the range that is being dragged; null ends it. */
  #select(ends) {
    if (!ends) this.start = undefined;
    const [from, to] = (ends ?? [0, 0]).map((x) => this.px(x)).sort((a, b) => a - b);
    this.selection?.setAttribute("x", from);
    this.selection?.setAttribute("width", to - from);
  }

  #jump() {
    if (this.place !== null && this.place !== undefined) this.cursor.jump(this.data.stepAt ? this.data.stepAt(this.place) : this.place);
  }

  #key(event) {
    const xs = this.domain ? this.places().filter((x) => x >= this.domain[0] && x <= this.domain[1]) : [];
    if (!xs.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const way = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 }[event.key];
    const { zoom } = this.cursor;
    const axis = this.data.xName;
    if (event.key === "+" || event.key === "=") zoom.by(axis, 2, this.cursor.x, this.whole);
    else if (event.key === "-") zoom.by(axis, 0.5, this.cursor.x, this.whole);
    else if (event.key === "0") zoom.reset();
    else if (event.key === "Enter") this.#jump();
    else if (way || event.key === "Home" || event.key === "End") {
      const at = this.cursor.x === null ? xs.length - 1 : nearest(xs, this.cursor.x);
      const to = event.key === "Home" ? 0 : event.key === "End" ? xs.length - 1 : at + way;
      this.cursor.move(xs[Math.min(xs.length - 1, Math.max(0, to))]);
    } else return;
    event.preventDefault();
  }

  /** Shows the values at x, or the last ones. */
  point(x) {
    if (!this.domain || !this.visible) return;
    const { place, parts } = this.show(x);
    this.place = place;
    const many = parts.length > 1;
    this.needle.setAttribute("d", place === null ? "" : `M${this.px(place)} ${TOP}v${this.inner.height}`);
    const at = place === null ? "" : `${this.data.xName === "seconds" ? `${Math.round(place)} s` : `step ${place}`}  `;
    this.readout.replaceChildren(
      ...(at ? [h("span", { className: "at" }, at)] : []),
      ...parts.map((one) => h("span", { className: many ? `value c${one.colour}${one.dashed ? " dashed" : ""}` : "value" }, one.text)),
    );
    const said = parts.map((one) => (many ? `${one.name} ${one.text}` : one.text)).join(", ");
    this.plot.setAttribute("aria-valuenow", place ?? this.domain[1]);
    this.plot.setAttribute("aria-valuetext", `${at || "last: "}${said}`);
  }
}

/** The dialog with one plot in large. */
export class Enlarged {
  constructor(view, cursor) {
    Object.assign(this, { view, cursor });
    this.body = h("div", {});
    const { zoom } = cursor;
    const by = (factor) => () => this.plot && zoom.by(this.plot.data.xName, factor, cursor.x, this.plot.whole);
    const button = (text, click) => h("button", { type: "button", click }, text);
    const tools = h(
      "div",
      { className: "tools" },
      button("Zoom in", by(2)),
      button("Zoom out", by(0.5)),
      button("Reset zoom", () => zoom.reset()),
      button("Close", () => this.element.close()),
    );
    this.element = h("dialog", { className: "enlarged", "aria-label": "Enlarged curve", close: () => this.view.set({ big: null }) }, this.body, tools);
    view.listen(["big"], () => this.update());
  }

  /** Opens or closes as the view says; a plot may appear only with its data. */
  update() {
    const key = this.view.get("big");
    if (key === (this.key ?? "")) {
      this.plot?.refresh();
      return;
    }
    if (this.plot) this.cursor.plots.delete(this.plot);
    this.plot = this.key = null;
    const small = [...this.cursor.plots].find((plot) => plot.key === key);
    if (!small) {
      this.element.close();
      return;
    }
    this.key = key;
    this.plot = small.copy();
    this.body.replaceChildren(this.plot.element);
    if (!this.element.open) this.element.showModal();
    this.plot.plot.focus();
  }
}

/** [first, last] over ascending lists, widened where they are one x. */
export function extentOf(lists) {
  let from = Infinity;
  let to = -Infinity;
  for (const xs of lists) {
    if (!xs.length) continue;
    from = Math.min(from, xs[0]);
    to = Math.max(to, xs[xs.length - 1]);
  }
  if (from > to) return [0, 1];
  return from === to ? [from - 0.5, to + 0.5] : [from, to];
}
