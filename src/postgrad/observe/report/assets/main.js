// Puts the page together, then feeds it: from its own blocks, or from the server of `postgrad watch`.

import { Cursor } from "./chart.js";
import { Curves } from "./curves.js";
import { h } from "./dom.js";
import { count } from "./format.js";
import { Overview } from "./overview.js";
import { Phases } from "./phases.js";
import { Samples } from "./samples.js";
import { section, shell } from "./shell.js";
import { Store } from "./store.js";
import { batchTables, evaluationTables, Events, Recipes } from "./tables.js";
import { unpack } from "./unpack.js";

const POLL = 2000; // milliseconds
const KEPT_BLOCKS = 8;

function redrawn(store, kinds, draw, empty) {
  const element = h("div", {});
  store.listen((told) => {
    if (!kinds.some((kind) => told.has(kind))) return;
    const parts = store.runs.flatMap((run) => draw(run, store.runs.length > 1));
    element.replaceChildren(...(parts.length ? parts : [h("p", { className: "quiet" }, empty)]));
  });
  return element;
}

function build(contents, fetchBody) {
  const store = new Store(contents.runs);
  const cursor = new Cursor();
  const view = { axis: "step", weight: 0.6, log: false };
  const overview = new Overview(store);
  const samples = new Samples(store, fetchBody, contents.live);
  const sections = [
    section("overview", "Overview", overview.element),
    section("curves", "Curves", new Curves(store, cursor, view).element),
    section("phases", "Time and memory", new Phases(store, cursor).element),
    section("evaluations", "Evaluations", redrawn(store, ["evaluations", "reset"], evaluationTables, "Nothing was evaluated.")),
    section("samples", "Samples", samples.element),
    section("events", "Events", new Events(store).element),
    section("batch", "Batch", redrawn(store, ["run", "events"], batchTables, "")),
    section("recipe", "Recipe", new Recipes(store, contents.differences).element),
  ];
  const { parts, status } = shell(contents.title, contents.live, sections);
  document.body.append(...parts);
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || !samples.search) return;
    event.preventDefault();
    samples.search.focus();
  });
  return { store, status };
}

/** Bodies of the page's own blocks; the last few stay unpacked. */
function fromBlocks(contents) {
  const kept = new Map();
  return async (run, id) => {
    const [block] = contents.bodies.find(([, of, start, end]) => of === run && start <= id && id < end);
    if (!kept.has(block)) kept.set(block, unpack(block));
    if (kept.size > KEPT_BLOCKS) kept.delete(kept.keys().next().value);
    const { vocab, bodies } = await kept.get(block);
    return { vocab, body: bodies[id] };
  };
}

async function load(contents) {
  const { store } = build(contents, fromBlocks(contents));
  store.add(await unpack("runs", true));
  for (const block of contents.rows) store.add(await unpack(block, true));
}

async function ask(path, query) {
  const token = new URLSearchParams(location.search).get("token") ?? "";
  const answer = await fetch(`${path}?${new URLSearchParams(query)}`, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  return answer.json();
}

async function follow(contents) {
  const fetchBody = async (run, id) => {
    const { vocab, bodies } = await ask("/bodies", { run, id });
    if (!bodies[id]) throw new Error("the run does not have it any more");
    return { vocab, body: bodies[id] };
  };
  const { store, status } = build(contents, fetchBody);
  let next = 0;
  let generation = "";
  for (;;) {
    try {
      const told = await ask("/messages", { generation, next });
      if (generation && told.generation !== generation) location.reload();
      ({ generation, next } = told);
      store.add(told.messages);
      status.textContent = `live, step ${count(store.runs[0].steps)}`;
      status.classList.remove("lost");
      if (told.more) continue;
    } catch (error) {
      status.textContent = `no answer: ${error.message}`;
      status.classList.add("lost");
    }
    await new Promise((resolve) => setTimeout(resolve, POLL));
  }
}

const contents = JSON.parse(document.getElementById("contents").textContent);
(contents.live ? follow(contents) : load(contents)).catch((error) => {
  document.body.append(h("p", { className: "trouble", role: "alert" }, `This page cannot be shown: ${error.message}. It needs a browser of 2023 or later.`));
});
