// One sample: prompt, response, rewards, what verifiers said, its group, the same prompt elsewhere.

import { choice, field, h, table } from "./dom.js";
import { count, counted, fixed, plain } from "./format.js";
import { COLOURS, flatTokens, tokenView } from "./tokens.js";
import { groupTable, promptTable } from "./related.js";

const LONG_TEXT = 4000; // characters of a prompt or a value before it folds

export class Detail {
  constructor(store, fetchBody, close) {
    Object.assign(this, { store, fetchBody });
    this.colour = "advantage";
    this.title = h("h3", { tabIndex: -1 }, "No sample is open");
    this.content = h("div", {}, h("p", { className: "quiet" }, "Choose one in the list."));
    const back = h("button", { type: "button", className: "back", click: close }, "Back to the list");
    this.element = h("article", { className: "detail", "aria-label": "Sample" }, h("header", {}, this.title, back), this.content);
    this.element.addEventListener("keydown", (event) => event.key === "Escape" && close());
  }

  async open(row) {
    this.row = row;
    const { group } = row;
    this.title.textContent = `Step ${count(group.step)}, ticket ${count(group.ticket)}, sample ${row.sample}`;
    this.element.setAttribute("aria-busy", "true");
    let found;
    try {
      found = await this.fetchBody(row.run, row.id);
    } catch (error) {
      if (this.row === row) this.content.replaceChildren(h("p", { className: "trouble", role: "alert" }, `This sample cannot be read: ${error.message}`));
      return;
    }
    if (this.row !== row) return; // another was opened meanwhile
    this.element.removeAttribute("aria-busy");
    this.found = found;
    this.tokens = flatTokens(found.body, found.vocab, this.row.group);
    this.content.replaceChildren(...this.#parts().filter(Boolean));
  }

  #parts() {
    const { row, found } = this;
    const open = (other) => this.open(other).then(() => this.title.focus());
    return [
      this.#facts(),
      this.#prompt(),
      h("h4", {}, "Response"),
      this.#response(),
      rewards(row),
      failures(row),
      notes(found.body),
      groupTable(this.store, row, open),
      promptTable(this.store, row, open),
    ];
  }

  #facts() {
    const { row } = this;
    const versions = (this.found.body.policy_version ?? []).map(([version]) => version);
    const facts = [
      this.store.many ? h("span", { className: `run-name c${row.run}` }, this.store.all[row.run].name) : null,
      counted(row.tokens, "token"),
      row.finish === "length" ? "truncated at the token limit" : row.finish === "dead_end" ? "truncated: no token continues its grammar" : plain(row.finish),
      row.group.filtered ? `group filtered: ${plain(row.group.filtered)}` : null,
      row.group.evaluated ? `evaluation${row.group.set ? ` on ${plain(row.group.set)}` : ""}` : row.kept === false ? "dropped" : row.trained ? "trained on" : "not trained on",
      row.correct === undefined ? null : row.correct ? "right" : "wrong",
      row.greedy ? "greedy" : null,
      versions.length ? `policy ${[...new Set(versions)].map(count).join(", ")}` : null,
      row.group.dataset ? `${plain(row.group.dataset)}, row ${plain(row.group.row)}` : null,
    ];
    return h("p", { className: "lead" }, facts.filter(Boolean).map((fact) => h("span", {}, fact)));
  }

  #prompt() {
    const { row, found } = this;
    const { prompt, prompt_texts: changed } = found.body;
    const whole = prompt.map((id, i) => changed?.[i] ?? found.vocab[id] ?? null);
    const known = whole.length > 0 && whole.every((text) => text !== null);
    return h(
      "div",
      {},
      h("h4", {}, "Question"),
      folded(row.group.question ?? "", "prose"),
      (found.body.images ?? []).map((digest) => picture(digest, found.images[digest])),
      row.group.answer === undefined ? null : h("p", { className: "expected" }, h("span", { className: "quiet" }, "Reference "), folded(row.group.answer, "inline")),
      known ? h("details", {}, h("summary", {}, `${this.#read()}, ${counted(prompt.length, "token")}`), folded(whole.join(""), "prose mono")) : null,
    );
  }

  #read() {
    const replaced = this.found.body.turns[0]?.opens;
    return replaced ? "The row's prompt, which the environment replaced" : "The prompt as the model read it";
  }

  #response() {
    const { row, found, tokens } = this;
    const spoken = found.body.turns.map((turn) => plain(turn.text ?? "")).join("\n");
    const text = row.text ?? spoken;
    const untold = tokens.some((token) => token.text === null);
    // those of an evaluation have no advantages
    const colour = this.colour === "advantage" && row.group.evaluated ? "logprob" : this.colour;
    const view = h("div", {}, tokenView(tokens, found.body.turns, colour));
    const select = choice(COLOURS.filter(([name]) => name !== "version" || tokens.some((token) => token.version !== undefined)), colour, (colour) => {
      this.colour = colour;
      view.replaceChildren(tokenView(tokens, found.body.turns, colour));
    });
    return h(
      "div",
      { className: "response" },
      untold ? folded(text, "prose mono") : null,
      h("div", { className: "tools" }, field("Colour by", select)),
      untold ? h("p", { className: "quiet" }, "No tokenizer was found beside the run: tokens are shown by their ids.") : null,
      view,
      found.body.turns.flatMap((turn) => turn.images ?? []).map((digest) => picture(digest, found.images[digest])),
    );
  }
}

function rewards(row) {
  const entries = Object.entries(row.rewards ?? {});
  const failed = new Set((row.failures ?? []).map((one) => one.component));
  const columns = [{ name: "component" }, { name: "score", number: true }];
  const rows = entries.map(([name, value]) => [name, value === null || failed.has(name) ? "failed" : fixed(value, 4)]);
  rows.push([h("strong", {}, "reward"), typeof row.total === "number" ? h("strong", {}, fixed(row.total, 4)) : "none"]);
  if (typeof row.advantage === "number") rows.push(["advantage, mean over tokens in the loss", fixed(row.advantage, 4)]);
  return h("div", {}, h("h4", {}, "Rewards"), table("Rewards by component", columns, rows, { hidden: true }));
}

function failures(row) {
  if (!row.failures) return null;
  const items = row.failures.map((one) => h("li", {}, `${plain(one.component)}: ${plain(one.cause)}. `, folded(one.message ?? "", "inline mono")));
  return h("div", {}, h("h4", {}, "Verifiers that failed"), h("ul", { className: "trouble" }, items));
}

function notes(body) {
  const parts = [
    ["What verifiers noted", body.details],
    ["Counts of the environment", body.counts],
    ["What verifiers read", body.last_text],
    ["Metadata of the row", body.metadata],
    ["Columns of the environment", body.columns],
  ];
  return h(
    "div",
    { className: "notes" },
    parts
      .filter(([, value]) => value !== undefined)
      .map(([name, value], place) => h("details", { open: place === 0 && name === parts[0][0] }, h("summary", {}, name), folded(typeof value === "string" ? value : JSON.stringify(value, null, 2), "prose mono"))),
  );
}

/** Text of a model or a data set; a long one opens on demand. */
function folded(text, kind) {
  const whole = plain(text);
  const box = h(kind.startsWith("inline") ? "span" : "div", { className: kind });
  if (whole.length <= LONG_TEXT) {
    box.textContent = whole;
    return box;
  }
  const rest = count(whole.length - LONG_TEXT);
  const more = h("button", { type: "button", click: () => (box.textContent = whole) }, `Show ${rest} more characters`);
  box.append(whole.slice(0, LONG_TEXT), "… ", more);
  return box;
}

/** An image of the prompt or of a reply, as a data URL of a raster format, or why it is not shown. */
function picture(digest, image) {
  const name = `Image ${digest.slice(0, 12)}`;
  if (image.src) return h("img", { className: "picture", src: image.src, alt: name });
  return h("p", { className: "quiet" }, `${name}: ${image.why}.`);
}
