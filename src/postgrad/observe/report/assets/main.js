// Puts the page together, then feeds it: from its own blocks, or from the server of `postgrad watch`.

import { Cursor, Enlarged } from "./plot.js";
import { Curves } from "./curves.js";
import { h } from "./dom.js";
import { count, counted } from "./format.js";
import { Overview } from "./overview.js";
import { Phases } from "./phases.js";
import { RunBar } from "./runs.js";
import { Samples } from "./samples.js";
import { section, shell } from "./shell.js";
import { Store } from "./store.js";
import { Strips } from "./strips.js";
import { batchTables, evaluationTables, Events, Recipes } from "./tables.js";
import { Timelines } from "./timeline.js";
import { unpack } from "./unpack.js";
import { View, Zoom } from "./view.js";

const POLL = 2000; // milliseconds
const SHOWN_EVERY = 300; // milliseconds, while a page is unpacked: each time all of it is drawn anew
const KEPT_BLOCKS = 8;
const NAMED = 3; // runs in the heading

function redrawn(store, kinds, draw, empty) {
  const element = h("div", {});
  store.listen((told) => {
    if (!kinds.some((kind) => told.has(kind))) return;
    const parts = store.runs.flatMap((run) => draw(run, store.many, store.runs));
    element.replaceChildren(...(parts.length ? parts : [h("p", { className: "quiet" }, empty)]));
  });
  return element;
}

function build(contents, fetchBody) {
  const view = new View();
  const zoom = new Zoom(view);
  const store = new Store(contents.runs, view);
  const samples = new Samples(store, fetchBody, contents.live, view);
  const cursor = new Cursor(zoom, (key) => view.set({ big: key }), (step) => {
    view.set({ big: null });
    if (samples.showStep(step)) samples.body.scrollIntoView({ behavior: "instant" });
  });
  const timelines = new Timelines(store, view, zoom);
  const sections = [
    section("overview", "Overview", new Overview(store, view, contents.differences).element),
    section("curves", "Curves", new Curves(store, cursor, view).element),
    section("distributions", "Distributions", new Strips(store, cursor).element),
    section("phases", "Time and memory", new Phases(store, cursor, timelines.element).element),
    section("evaluations", "Evaluations", redrawn(store, ["evaluations", "reset"], evaluationTables, "Nothing was evaluated.")),
    section("samples", "Samples", samples.element),
    section("events", "Events", new Events(store, view).element),
    section("batch", "Batch", redrawn(store, ["run", "events"], batchTables, "")),
    section("recipe", "Recipe", new Recipes(store, view, contents.differences).element),
  ];
  const { parts, status, heading } = shell(contents, view, new RunBar(store, view, zoom).element, sections);
  const enlarged = new Enlarged(view, cursor);
  document.body.append(...parts, enlarged.element);
  store.listen((told) => {
    enlarged.update();
    const names = store.all.map((run) => run.name);
    if (told.has("chosen") && names.length <= NAMED) heading.textContent = names.join(" against ");
  });
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || samples.body.hidden) return;
    event.preventDefault();
    samples.search.focus();
  });
  let moved = false; // a person who scrolls while the page loads is left where they are
  for (const kind of ["wheel", "pointerdown", "keydown"]) addEventListener(kind, () => (moved = true), { once: true });
  const restore = () => moved || !view.section || sections.find((one) => one.id === view.section)?.scrollIntoView({ behavior: "instant" });
  return { store, status, restore };
}

/** Bodies of the page's own blocks; the last few stay unpacked. */
function fromBlocks(contents) {
  const kept = new Map();
  return async (run, id) => {
    const [block] = contents.bodies.find(([, of, start, end]) => of === run && start <= id && id < end);
    if (!kept.has(block)) kept.set(block, unpack(block));
    if (kept.size > KEPT_BLOCKS) kept.delete(kept.keys().next().value);
    const { vocab, bodies, images } = await kept.get(block);
    return { vocab, images, body: bodies[id] };
  };
}

async function load(contents) {
  const { store, restore } = build(contents, fromBlocks(contents));
  store.add(await unpack("runs", true));
  restore();
  let waiting = [];
  let shown = performance.now();
  for (const block of contents.rows) {
    waiting.push(...(await unpack(block, true)));
    if (performance.now() - shown < SHOWN_EVERY) continue;
    store.add(waiting.splice(0));
    shown = performance.now();
  }
  store.add(waiting);
  restore();
}

async function ask(path, query) {
  const token = new URLSearchParams(location.search).get("token") ?? "";
  const answer = await fetch(`${path}?${new URLSearchParams(query)}`, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()) || `${answer.status} ${answer.statusText}`);
  return answer.json();
}

/** "live, step 12"; or that all runs have finished; or for how long those under way have written nothing. */
function standing(runs, unwritten) {
  const several = runs.length > 1 ? "steps" : "step";
  const steps = runs.length > NAMED ? counted(runs.length, "run") : `${several} ${runs.map((run) => count(run.steps)).join(", ")}`;
  const silent = unwritten.filter((_, number) => !runs[number].finished).map((seconds) => Math.floor(seconds / 60));
  if (!silent.length) return `finished, ${steps}`;
  const minutes = Math.min(...silent); // whole ones: a screen reader tells each change
  if (!minutes) return `live, ${steps}`;
  return `${steps}, nothing written for ${minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h`}`;
}

async function follow(contents) {
  const fetchBody = async (run, id) => {
    const { vocab, bodies, images } = await ask("/bodies", { run, id });
    if (!bodies[id]) throw new Error("the run does not have it any more");
    return { vocab, images, body: bodies[id] };
  };
  const { store, status, restore } = build(contents, fetchBody);
  let restored = false;
  let next = 0;
  let generation = "";
  for (;;) {
    try {
      const told = await ask("/messages", { generation, next });
      if (generation && told.generation !== generation) location.reload();
      ({ generation, next } = told);
      store.add(told.messages);
      status.textContent = standing(store.all, told.unwritten);
      status.classList.remove("lost");
      if (told.more) continue;
      if (!restored) restore();
      restored = true;
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
