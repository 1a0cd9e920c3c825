// A line chart in SVG: raw values faint, the smoothed curve on top.

import { svg } from "./dom.js";
import { extentOf, Plot } from "./plot.js";
import { extent, last, nearest, smooth, thin, within } from "./series.js";

/** read() gives {series, references, weight, log, fromZero, marks, xName}; series are
 * {name, colour, xs, ys, low, high, dashed, measured}, `measured` being few points that are not
 * smoothed; `format` makes text of a value, also at the axis with `byFormat`, which is for bytes. */
export class Chart extends Plot {
  take(data) {
    this.series = data.series.map((one) => ({
      ...one,
      shown: data.weight && !one.measured ? smooth(one.ys, data.weight) : one.ys,
    }));
    return extentOf(this.series.map((one) => one.xs));
  }

  span([from, to]) {
    const { data } = this;
    const inside = (one, ys) => (ys ? within(one.xs, ys, from, to) : []);
    const all = this.series.flatMap((one) => [inside(one, one.ys), inside(one, one.low), inside(one, one.high)]);
    const references = (data.references ?? []).map((one) => one.value);
    this.log = Boolean(data.log) && all.every((list) => list.every((value) => !(value <= 0)));
    const scaled = (value) => (this.log ? Math.log10(value) : value);
    let [low, high] = extent([...all, references].map((list) => list.map(scaled)));
    if (data.fromZero) low = 0;
    else if (!this.log && all.every((list) => list.every((value) => !(value < 0)))) low = Math.max(0, low);
    return [low, high];
  }

  places() {
    return this.series[0]?.xs ?? [];
  }

  dots() {
    return (this.points = this.series.map((one) => svg("circle", { class: `dot c${one.colour}`, r: 3 })));
  }

  paint(root) {
    const { x, width } = this.inner;
    for (const one of this.data.references ?? []) {
      const at = this.py(one.value);
      root.append(
        svg("path", { class: "reference", d: `M${x} ${at}h${width}` }),
        svg("text", { class: "tick", x: x + width, y: at - 4, "text-anchor": "end" }, one.name),
      );
    }
    for (const one of this.series) this.#line(root, one);
  }

  #line(root, one) {
    const colour = `c${one.colour}`;
    const at = (i, ys) => `${this.px(one.xs[i]).toFixed(1)} ${this.py(ys[i]).toFixed(1)}`;
    const seen = this.#seenOf(one.xs);
    const path = (ys) => {
      const places = thin(ys.slice(...seen), this.width * 2).map((i) => i + seen[0]);
      const points = places.filter((i) => !Number.isNaN(ys[i])).map((i) => at(i, ys));
      return points.length ? `M${points.join("L")}` : "";
    };
    if (one.low && one.xs.length > 1) {
      const there = one.xs.map((_, i) => at(i, one.low));
      const back = one.xs.map((_, i) => at(one.xs.length - 1 - i, one.high));
      root.append(svg("path", { class: `band ${colour}`, d: `M${[...there, ...back].join("L")}Z` }));
    }
    one.ys.forEach((y, i) => {
      if (one.measured && !Number.isNaN(y)) root.append(svg("circle", { class: `dot still ${colour}`, r: 2, cx: this.px(one.xs[i]), cy: this.py(y) }));
    });
    if (this.data.weight && !one.measured && !one.dashed) root.append(svg("path", { class: `raw ${colour}`, d: path(one.ys) }));
    root.append(svg("path", { class: `line ${colour}${one.dashed ? " dashed" : ""}`, d: path(one.shown) }));
  }

  /** [first, end) of the points within the domain and one on either side. */
  #seenOf(xs) {
    const [from, to] = this.domain;
    let first = xs.findIndex((x) => x >= from);
    if (first < 0) first = xs.length;
    let end = first;
    while (end < xs.length && xs[end] <= to) end += 1;
    return [Math.max(0, first - 1), Math.min(xs.length, end + 1)];
  }

  show(x) {
    let place = null;
    const parts = this.series.map((one, n) => {
      const known = x !== null && one.xs.length > 0;
      const i = known ? nearest(one.xs, x) : -1;
      const value = known ? one.ys[i] : last(one.ys);
      if (known) place = one.xs[i];
      const inside = known && !Number.isNaN(value) && one.xs[i] >= this.domain[0] && one.xs[i] <= this.domain[1];
      this.points[n].setAttribute("visibility", inside ? "visible" : "hidden");
      if (inside) {
        this.points[n].setAttribute("cx", this.px(one.xs[i]));
        this.points[n].setAttribute("cy", this.py(one.shown[i]));
      }
      const band = one.low && known ? ` [${this.format(one.low[i])}, ${this.format(one.high[i])}]` : "";
      return { colour: one.colour, dashed: one.dashed, text: this.format(value) + band, name: one.name };
    });
    return { place, parts };
  }
}
