// The browser of samples: filters, the list, and the one that is open.

import { choice, field, h, searchBox, settled } from "./dom.js";
import { count, counted, fixed, preview } from "./format.js";
import { VirtualList } from "./list.js";
import { Detail } from "./detail.js";
import { FILTERS, queryOf, scoreOf, select, SORTS, STATES } from "./query.js";

const ROW = 58; // pixels
const NARROW = "(max-width: 860px)";

export class Samples {
  constructor(store, fetchBody, live, view) {
    Object.assign(this, { store, live, view });
    this.query = queryOf(view);
    this.typing = new Set(); // keys of fields that a person is changing
    this.list = new VirtualList({
      label: "Samples",
      height: ROW,
      draw: (row) => this.#row(row),
      chosen: (row, _, entered) => this.#choose(row, entered),
    });
    this.detail = new Detail(store, fetchBody, () => this.#back());
    this.status = h("p", { className: "status quiet", role: "status" });
    this.clear = h("button", { type: "button", className: "link", click: () => this.#clear() }, "Clear filters");
    this.account = h("p", { className: "quiet" });
    this.search = searchBox(view, "find", "in question, answer, response");
    this.tools = h("form", { className: "tools", "aria-label": "Filter samples" });
    this.tools.addEventListener("submit", (event) => event.preventDefault());
    const found = h("div", { className: "found" }, this.status, this.clear);
    const side = h("div", { className: "side", role: "search" }, field(["Search ", h("kbd", {}, "/")], this.search), found, this.list.element);
    this.body = h("div", { className: "browser" }, side, this.detail.element);
    this.none = h("p", { className: "quiet" }, "There are no samples: a run records those that it learns from (job = \"rl\") and those of evaluations with rewards.");
    this.element = h("div", {}, this.account, this.tools, this.body, this.none);
    const later = settled(() => this.update(), 60);
    store.listen((kinds) => (["groups", "counts", "reset", "run"].some((kind) => kinds.has(kind)) ? later() : 0));
    view.listen([...FILTERS, "score", "sort", "open"], () => this.update());
    this.update();
  }

  get rows() {
    const { runs } = this.store;
    return runs.length === 1 ? runs[0].rows : runs.flatMap((run) => run.rows);
  }

  /** The samples of a step, or of the nearest that has some, in place of the filters; false: none. */
  showStep(step) {
    const steps = this.rows.map((row) => row.group.step);
    if (!steps.length) return false;
    const near = steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
    const none = Object.fromEntries(FILTERS.map((key) => [key, null]));
    this.view.set({ ...none, from: near, to: near, open: null }, { push: true, section: "samples" });
    this.list.move(0);
    this.list.element.focus({ preventScroll: true });
    return true;
  }

  update() {
    const rows = this.rows;
    const some = rows.length > 0;
    this.none.hidden = some;
    this.tools.hidden = this.body.hidden = this.account.hidden = !some;
    if (!some) return;
    this.account.textContent = account(this.store.runs, this.store.many, this.live);
    this.query = queryOf(this.view);
    this.#controls(rows);
    const found = select(rows, this.query);
    this.status.textContent = found.length === rows.length ? counted(found.length, "sample") : `${count(found.length)} of ${counted(rows.length, "sample")}`;
    this.clear.hidden = FILTERS.every((key) => this.view.get(key) === "");
    const wanted = this.view.get("open");
    const open = wanted && (!this.detail.row || address(this.detail.row) !== wanted) ? rows.find((row) => address(row) === wanted) : undefined;
    this.list.show(found, open ?? this.detail.row);
    if (open) {
      this.detail.open(open);
      if (found.includes(open)) this.list.reveal();
    } else if (!this.detail.row && found.length) this.detail.open(found[0]);
  }

  #clear() {
    this.view.set(Object.fromEntries(FILTERS.map((key) => [key, null])));
    this.search.value = "";
    this.search.focus();
  }

  #controls(rows) {
    const components = [...new Set(rows.flatMap((row) => Object.keys(row.rewards ?? {})))];
    const finishes = [...new Set(rows.map((row) => row.finish).filter((one) => typeof one === "string"))];
    const runs = this.store.runs.map((run) => [String(run.number), run.name]);
    const shape = JSON.stringify([components, finishes, runs]);
    if (shape !== this.shape) {
      this.shape = shape;
      this.controls = new Map();
      this.tools.replaceChildren(...this.#fields(components, finishes, runs));
    }
    const { query } = this;
    const shown = { run: query.run, state: query.state, ended: query.finish, score: query.component, sort: query.sort };
    for (const [key, control] of this.controls) {
      if (document.activeElement !== control && !this.typing.has(key)) control.value = key in shown ? shown[key] : this.view.get(key);
    }
  }

  #fields(components, finishes, runs) {
    const { view, controls } = this;
    const kept = (key, control) => (controls.set(key, control), control);
    const select = (key, pairs, first = "") => kept(key, choice(pairs, first, (value) => view.set({ [key]: value === first ? null : value })));
    const typed = (key, label) => {
      const input = kept(key, h("input", { type: "number", step: "any", inputMode: "decimal", "aria-label": label }));
      const settle = settled(() => {
        this.typing.delete(key);
        view.set({ [key]: input.value });
      }, 150);
      input.addEventListener("input", () => {
        this.typing.add(key); // until then the view does not know it, and must not overwrite it
        settle();
      });
      return input;
    };
    const between = (label, low, high) => h("div", { className: "field", role: "group", "aria-label": label }, h("span", {}, label), h("span", { className: "pair" }, low, " to ", high));
    return [
      ...(runs.length > 1 ? [field("Run", select("run", [["", "all"], ...runs]))] : []),
      field("State", select("state", STATES)),
      ...(finishes.length > 1 ? [field("Ended by", select("ended", [["", "any"], ...finishes.map((one) => [one, one])]))] : []),
      between("Steps", typed("from", "first step"), typed("to", "last step")),
      field("Score", select("score", [["", "reward"], ...components.map((one) => [one, one])])),
      between("Between", typed("low", "least score"), typed("high", "highest score")),
      field("Sort", select("sort", SORTS, "step")),
    ];
  }

  #row(row) {
    const { group } = row;
    const score = scoreOf(row, this.query.component);
    const marks = [
      group.evaluated ? (row.greedy ? "evaluation, greedy" : "evaluation") : null,
      row.correct === false ? "wrong" : null,
      row.finish === "length" || row.finish === "dead_end" ? "truncated" : null,
      row.failures ? "failed" : null,
      group.filtered ? "filtered" : null,
      row.kept === false ? "dropped" : null,
    ];
    return [
      h("span", { className: "score" }, fixed(score, 2)),
      h("span", { className: "response-line mono" }, hit(row.text, this.query.text, 120) ?? (preview(row.text, 120) || "(empty)")),
      h(
        "span",
        { className: "about-line" },
        this.store.many ? h("span", { className: `run-name c${row.run}` }, this.store.all[row.run].name) : null,
        h("span", {}, `step ${count(group.step)}`),
        marks.filter(Boolean).map((mark) => h("span", { className: "mark" }, mark)),
        h("span", { className: "ask" }, hit(group.question, this.query.text, 110) ?? preview(group.question, 110)),
      ),
    ];
  }

  async #choose(row, entered) {
    this.view.set({ open: address(row) });
    await this.detail.open(row);
    if (!entered) return;
    this.detail.title.focus({ preventScroll: true });
    if (matchMedia(NARROW).matches) this.detail.element.scrollIntoView({ block: "start" });
  }

  #back() {
    this.list.element.focus();
    if (matchMedia(NARROW).matches) this.element.scrollIntoView({ block: "start" });
  }
}

/** What a link says of a sample. */
function address(row) {
  const { step, ticket, evaluated, set } = row.group;
  return [row.run, step, ticket, row.sample, ...(evaluated ? ["evaluation", set ?? ""] : [])].join("-");
}

/** A text around the first place where it has what was searched; null where it does not. */
function hit(text, wanted, most) {
  if (!wanted || typeof text !== "string") return null;
  const at = text.toLowerCase().indexOf(wanted.toLowerCase());
  if (at < 0) return null;
  const from = at < most / 3 ? 0 : at - 12;
  const parts = [text.slice(from, at), text.slice(at, at + wanted.length), text.slice(at + wanted.length, at + most)];
  const [before, found, after] = parts.map((part) => part.replace(/\s+/g, " "));
  return [`${from ? "…" : ""}${before}`, h("mark", {}, found), after];
}

/** How many samples are on the page, of how many. */
function account(runs, many, live) {
  const of = ({ name, counts: { samples, shown } }) => `${shown >= samples ? "all" : `${count(shown)} of`} ${counted(samples, "sample")}${many ? ` of ${name}` : ""}`;
  const text = runs.map(of).join(", ");
  const all = runs.every(({ counts: { samples, shown } }) => shown >= samples);
  const way = live ? "" : " postgrad report --all takes all of them.";
  return text[0].toUpperCase() + text.slice(1) + (all ? "." : `: whole groups, spread evenly over the steps, the same prompts where they come again.${way}`);
}
