// The browser of samples: filters, the list, and the one that is open.

import { choice, field, h, settled } from "./dom.js";
import { count, counted, fixed, preview } from "./format.js";
import { VirtualList } from "./list.js";
import { Detail } from "./detail.js";
import { emptyQuery, scoreOf, select, SORTS, STATES } from "./query.js";

const ROW = 58; // pixels
const NARROW = "(max-width: 860px)";

export class Samples {
  constructor(store, fetchBody, live) {
    this.store = store;
    this.live = live;
    this.query = emptyQuery();
    this.list = new VirtualList({
      label: "Samples",
      height: ROW,
      draw: (row) => this.#row(row),
      chosen: (row, _, entered) => this.#open(row, entered),
    });
    this.detail = new Detail(store, fetchBody, () => this.#back());
    this.status = h("p", { className: "status quiet", role: "status" });
    this.account = h("p", { className: "quiet" });
    this.tools = h("form", { className: "tools", role: "search", "aria-label": "Filter samples" });
    this.tools.addEventListener("submit", (event) => event.preventDefault());
    this.body = h("div", { className: "browser" }, h("div", { className: "side" }, this.status, this.list.element), this.detail.element);
    this.none = h("p", { className: "quiet" }, "There are no samples: a run records those that it learns from (job = \"rl\") and those of evaluations with rewards.");
    this.element = h("div", {}, this.account, this.tools, this.body, this.none);
    const later = settled(() => this.update(), 60);
    store.listen((kinds) => (["groups", "counts", "reset", "run"].some((kind) => kinds.has(kind)) ? later() : 0));
    this.update();
  }

  get rows() {
    const { runs } = this.store;
    return runs.length === 1 ? runs[0].rows : runs.flatMap((run) => run.rows);
  }

  update() {
    const rows = this.rows;
    const some = rows.length > 0;
    this.none.hidden = some;
    this.tools.hidden = this.body.hidden = this.account.hidden = !some;
    if (!some) return;
    this.account.textContent = this.store.runs.map((run) => account(run, this.store.runs.length > 1, this.live)).join(" ");
    this.#controls(rows);
    const found = select(rows, this.query);
    this.status.textContent = found.length === rows.length ? counted(found.length, "sample") : `${count(found.length)} of ${counted(rows.length, "sample")}`;
    this.list.show(found, this.detail.row);
    if (!this.detail.row && found.length) this.#open(found[0], false);
  }

  #controls(rows) {
    const components = [...new Set(rows.flatMap((row) => Object.keys(row.rewards ?? {})))];
    const finishes = [...new Set(rows.map((row) => row.finish).filter((one) => typeof one === "string"))];
    const shape = JSON.stringify([components, finishes, this.store.runs.map((run) => run.name)]);
    if (shape === this.shape) return;
    this.shape = shape;
    const { query } = this;
    const set = (key) => (value) => {
      query[key] = value;
      this.update();
    };
    const typed = settled(() => this.update(), 150);
    const numeric = (key, label) => {
      const input = h("input", { type: "number", step: "any", inputMode: "decimal", value: Number.isNaN(query[key]) ? "" : query[key], "aria-label": label });
      input.addEventListener("input", () => {
        query[key] = input.value === "" ? NaN : Number(input.value);
        typed();
      });
      return input;
    };
    this.search = h("input", { type: "search", value: query.text, placeholder: "in question, answer, response", autocomplete: "off", spellcheck: false });
    this.search.addEventListener("input", () => {
      query.text = this.search.value;
      typed();
    });
    const between = (label, low, high) => h("div", { className: "field", role: "group", "aria-label": label }, h("span", {}, label), h("span", { className: "pair" }, low, " to ", high));
    const runs = this.store.runs.map((run) => [String(run.number), run.name]);
    this.tools.replaceChildren(
      field(["Search ", h("kbd", {}, "/")], this.search),
      ...(runs.length > 1 ? [field("Run", choice([["", "all"], ...runs], query.run, set("run")))] : []),
      field("State", choice(STATES, query.state, set("state"))),
      ...(finishes.length > 1 ? [field("Ended by", choice([["", "any"], ...finishes.map((one) => [one, one])], query.finish, set("finish")))] : []),
      between("Steps", numeric("from", "first step"), numeric("to", "last step")),
      field("Score", choice([["total", "reward"], ...components.map((one) => [one, one])], query.component, set("component"))),
      between("Between", numeric("low", "least score"), numeric("high", "highest score")),
      field("Sort", choice(SORTS, query.sort, set("sort"))),
    );
  }

  #row(row) {
    const { group } = row;
    const score = scoreOf(row, this.query.component);
    const marks = [
      group.evaluated ? (row.greedy ? "evaluation, greedy" : "evaluation") : null,
      row.correct === false ? "wrong" : null,
      row.finish === "length" ? "truncated" : null,
      row.failures ? "failed" : null,
      group.filtered ? "filtered" : null,
      row.kept === false ? "dropped" : null,
    ];
    return [
      h("span", { className: "score" }, fixed(score, 2)),
      h("span", { className: "response-line mono" }, preview(row.text, 120) || "(empty)"),
      h(
        "span",
        { className: "about-line" },
        this.store.runs.length > 1 ? h("span", { className: `run-name c${row.run}` }, this.store.runs[row.run].name) : null,
        h("span", {}, `step ${count(group.step)}`),
        marks.filter(Boolean).map((mark) => h("span", { className: "mark" }, mark)),
        h("span", { className: "ask" }, preview(group.question, 110)),
      ),
    ];
  }

  async #open(row, entered) {
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

function account(run, many, live) {
  const { samples, shown } = run.counts;
  const name = many ? `${run.name}: ` : "";
  if (shown >= samples) return `${name}All ${counted(samples, "sample")}.`;
  const way = live ? "" : " postgrad report --all takes all of them.";
  return `${name}${count(shown)} of ${counted(samples, "sample")}, spread evenly over the steps, whole groups, and the same prompts where they come again.${way}`;
}
