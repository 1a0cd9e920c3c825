// Which samples are listed, and in which order: pure functions over rows.

export const STATES = [
  ["", "any"],
  ["trained", "trained on"],
  ["untrained", "not trained on"],
  ["evaluated", "evaluation"],
  ["wrong", "evaluation, wrong"],
  ["truncated", "truncated"],
  ["failed", "a verifier failed"],
  ["filtered", "group filtered"],
];

export const SORTS = [
  ["step", "step, first to last"],
  ["-step", "step, last to first"],
  ["-total", "reward, high to low"],
  ["total", "reward, low to high"],
  ["-tokens", "longest"],
  ["tokens", "shortest"],
  ["-advantage", "advantage, high to low"],
  ["advantage", "advantage, low to high"],
];

const TESTS = {
  trained: (row) => row.trained,
  untrained: (row) => !row.trained && !row.group.evaluated,
  evaluated: (row) => Boolean(row.group.evaluated),
  wrong: (row) => row.correct === false,
  truncated: (row) => row.finish === "length" || row.finish === "dead_end",
  failed: (row) => Boolean(row.failures),
  filtered: (row) => Boolean(row.group.filtered),
};

/** What is wanted, from the address: whatever is not known there means no filter. */
export function queryOf(view) {
  const known = (pairs, key, otherwise) => (pairs.some(([name]) => name === view.get(key)) ? view.get(key) : otherwise);
  return {
    text: view.get("find"),
    run: view.get("run"),
    state: known(STATES, "state", ""),
    finish: view.get("ended"),
    component: view.get("score"),
    low: view.number("low"),
    high: view.number("high"),
    from: view.number("from"),
    to: view.number("to"),
    sort: known(SORTS, "sort", "step"),
  };
}

/** Keys of the address that leave samples out. */
export const FILTERS = ["find", "run", "state", "ended", "low", "high", "from", "to"];

/** The score of a component, the total where it is ""; null where there is none. */
export function scoreOf(row, component) {
  const value = component === "" ? row.total : Object.entries(row.rewards ?? {}).find(([name]) => name === component)?.[1];
  return typeof value === "number" ? value : null;
}

/** The rows that a query wants, sorted. */
export function select(rows, query) {
  const found = rows.filter((row) => wanted(row, query));
  const down = query.sort.startsWith("-");
  const key = down ? query.sort.slice(1) : query.sort;
  if (key === "step") return found.sort((a, b) => (down ? b.group.step - a.group.step : a.group.step - b.group.step));
  const value = (row) => (typeof row[key] === "number" ? row[key] : null);
  return found.sort((a, b) => compare(value(a), value(b), down));
}

function compare(a, b, down) {
  if (a === null || b === null) return (a === null) - (b === null); // unknown ones last
  return down ? b - a : a - b;
}

function wanted(row, query) {
  const { group } = row;
  if (query.run !== "" && row.run !== Number(query.run)) return false;
  if (group.step < query.from || group.step > query.to) return false;
  if (query.state && !TESTS[query.state](row)) return false;
  if (query.finish && row.finish !== query.finish) return false;
  if (!Number.isNaN(query.low) || !Number.isNaN(query.high)) {
    const score = scoreOf(row, query.component);
    if (score === null || score < query.low || score > query.high) return false;
  }
  return !query.text || holds(row, query.text.toLowerCase());
}

function holds(row, text) {
  const { group } = row;
  return [row.text, group.question, group.answer].some(
    (one) => typeof one === "string" && one.toLowerCase().includes(text),
  );
}
