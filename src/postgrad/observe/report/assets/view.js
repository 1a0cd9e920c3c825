// What a person has chosen to see: zoom, filters, names of runs, the open sample. It is in the part
// of the address after "#", as "#SECTION?KEY=VALUE&...", so that a link shows the same.

const LONGEST = 1000; // characters of a value

export class View {
  constructor() {
    this.listeners = [];
    this.#read();
    addEventListener("popstate", () => {
      const before = this.values;
      this.#read();
      const keys = new Set([...before.keys(), ...this.values.keys()]);
      this.#tell([...keys].filter((key) => before.get(key) !== this.values.get(key)));
    });
  }

  get(key) {
    return this.values.get(key) ?? "";
  }

  /** The number under a key, NaN where there is none. */
  number(key) {
    const text = this.get(key);
    return text.trim() === "" ? NaN : Number(text);
  }

  /** Changes values; an empty one is removed. push: the browser's way back leads to those of before. */
  set(changes, { push = false, section = this.section } = {}) {
    const changed = Object.keys(changes).filter((key) => this.get(key) !== textOf(changes[key]));
    if (!changed.length && section === this.section) return;
    this.section = section;
    for (const key of changed) {
      const text = textOf(changes[key]);
      if (text) this.values.set(key, text);
      else this.values.delete(key);
    }
    const query = new URLSearchParams([...this.values].sort(([a], [b]) => (a < b ? -1 : 1)));
    const hash = `#${section}${this.values.size ? `?${query}` : ""}`;
    if (push) history.pushState(null, "", hash);
    else history.replaceState(null, "", hash);
    this.#tell(changed);
  }

  /** heard() is called after one of these keys has changed; a key that ends with "*" is a prefix. */
  listen(keys, heard) {
    this.listeners.push({ keys, heard });
  }

  #read() {
    const [section, query = ""] = location.hash.slice(1).split(/\?(.*)/s);
    this.section = section;
    this.values = new Map([...new URLSearchParams(query)].map(([key, value]) => [key, value.slice(0, LONGEST)]));
  }

  #tell(changed) {
    const has = (key) => changed.some((one) => (key.endsWith("*") ? one.startsWith(key.slice(0, -1)) : one === key));
    for (const { keys, heard } of this.listeners) if (keys.some(has)) heard();
  }
}

function textOf(value) {
  return value === null || value === undefined || Number.isNaN(value) || value === false ? "" : String(value).slice(0, LONGEST);
}

/** The zoom of all curves over an axis, "step" or "seconds". */
export class Zoom {
  constructor(view) {
    this.view = view;
  }

  /** [from, to] or null. */
  range(axis) {
    const [from, to] = this.view.get("zoom").split("..").map(Number);
    return axis === this.axis && from < to ? [from, to] : null;
  }

  get axis() {
    return this.view.get("over") === "seconds" ? "seconds" : "step";
  }

  set(axis, from, to) {
    const round = axis === "step" ? Math.round : (x) => Math.round(x * 10) / 10;
    const ends = [round(from), round(to)];
    if (axis === this.axis && ends[0] < ends[1]) this.view.set({ zoom: ends.join("..") });
  }

  /** Divides the width by `factor` within the whole [from, to]; closer around x, wider around the middle. */
  by(axis, factor, x, [from, to]) {
    const [left, right] = this.range(axis) ?? [from, to];
    const middle = factor > 1 && x !== null ? x : (left + right) / 2;
    const ends = [middle - (middle - left) / factor, middle + (right - middle) / factor];
    if (ends[0] <= from && ends[1] >= to) this.reset();
    else this.set(axis, Math.max(from, Math.floor(ends[0])), Math.min(to, Math.ceil(ends[1])));
  }

  reset() {
    this.view.set({ zoom: null });
  }
}
