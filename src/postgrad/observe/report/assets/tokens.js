// A sample's tokens in colour: what each weighed, and how sure the policy was.

import { h } from "./dom.js";
import { count, counted, fixed, number, plain } from "./format.js";

export const COLOURS = [
  ["advantage", "advantage"],
  ["logprob", "logprob"],
  ["difference", "logprob difference"],
  ["ratio", "ratio"],
  ["mask", "mask"],
  ["version", "policy version"],
  ["none", "no colour"],
];
const LEVELS = 8;
const AT_ONCE = 4000; // tokens drawn before a person asks for more
const LEAST_DIFFERENCE = 1e-3; // nats: below, two programs agree and colours would show rounding
const HINT = "Point at a token, or go through them with the arrow keys, to read its values.";
const LOGPROB_UNIT = 1e-3;
const DIFFERENCE_UNIT = 1e-5;

const VERSIONS = 6; // colours; older ones begin anew

/** Flat tokens of a body: {id, text, author, logprob, difference, advantage, mask, version, age}.
 *
 * The spans of policy_version are of the policy's tokens alone. Step k, counted from 1, trains with
 * version k - 1. group: for its step; the tokens of an evaluation have no age. */
export function flatTokens(body, vocab, group) {
  const found = [];
  const spans = (Array.isArray(body.policy_version) ? body.policy_version : []).filter((span) => Array.isArray(span) && span.every(Number.isInteger));
  let [span, left] = [0, spans[0]?.[1] ?? 0];
  const versionOf = (author) => {
    if (author !== "policy") return undefined;
    while (span < spans.length && left <= 0) left = spans[(span += 1)]?.[1] ?? 0;
    left -= 1;
    return spans[span]?.[0];
  };
  const at = (values, place) => (Array.isArray(values) ? values[place] : values);
  for (const turn of body.turns) {
    turn.ids.forEach((id, i) => {
      const place = found.length;
      const version = versionOf(turn.author);
      found.push({
        id,
        text: turn.texts?.[i] ?? vocab[id] ?? null,
        author: turn.author,
        logprob: scaled(turn.logprobs[i], LOGPROB_UNIT),
        difference: scaled(turn.differences?.[i], DIFFERENCE_UNIT),
        advantage: at(body.advantages, place),
        mask: at(body.mask, place),
        version,
        age: version === undefined || group.evaluated ? undefined : group.step - 1 - version,
      });
    });
  }
  return found;
}

function scaled(value, unit) {
  return typeof value === "number" ? value * unit : undefined;
}

/** How a colour is read: {legend or ends, value(token) from -1 to 1 or null}. */
export function scaleOf(colour, tokens) {
  const most = (key) => tokens.reduce((high, token) => Math.max(high, Math.abs(token[key] ?? 0)), 0);
  const known = (key, of) => (token) => (typeof token[key] === "number" ? of(token[key]) : null);
  const has = (key) => tokens.some((token) => typeof token[key] === "number");
  if (colour === "advantage") {
    if (!has("advantage")) return { legend: "not trained on: there are no advantages", value: () => null };
    const limit = most("advantage");
    if (!limit) return { legend: "all advantages are 0: this group has no gradient", value: () => null };
    return { ends: [`−${number(limit)}`, `+${number(limit)}`], value: known("advantage", (v) => v / limit) };
  }
  if (colour === "logprob") return { ends: ["likely", "6 nats of surprise"], value: known("logprob", (v) => Math.max(-1, v / 6)) };
  if (colour === "difference" || colour === "ratio") {
    if (!has("difference")) return { legend: "the learner's logprobs were not computed", value: () => null };
    const limit = Math.max(most("difference"), LEAST_DIFFERENCE);
    const ends =
      colour === "ratio"
        ? [number(Math.exp(-limit)), `${number(Math.exp(limit))} (learner / sampler)`]
        : [`−${number(limit)}`, `+${number(limit)} nats (learner − sampler)`];
    return { ends, value: known("difference", (v) => v / limit) };
  }
  if (colour === "mask") return { legend: "coloured: in the loss", value: (token) => (token.mask ? 0.6 : null) };
  if (colour === "version") return versionScale(tokens);
  return { legend: "", value: () => null };
}

/** A colour for each version of the weights, in the order in which they wrote. */
function versionScale(tokens) {
  const known = tokens.filter((token) => token.version !== undefined);
  const found = [...new Set(known.map((token) => token.version))];
  const named = (version) => {
    const of = known.filter((token) => token.version === version);
    const age = of[0].age === undefined ? "" : of[0].age === 0 ? ", this step's own" : `, ${counted(of[0].age, "step")} old`;
    return `version ${count(version)}${age}: ${counted(of.length, "token")}`;
  };
  const of = (version) => `v${found.indexOf(version) % VERSIONS}`;
  return { versions: found.map((version) => [of(version), named(version)]), of, value: () => null };
}

/** The class of a value from -1 to 1. */
export function shade(value) {
  if (value === null || Number.isNaN(value)) return "";
  const level = Math.min(LEVELS, Math.ceil(Math.abs(value) * LEVELS - 1e-9));
  return level ? `${value < 0 ? "n" : "q"}${level}` : "";
}

/** The response as coloured tokens, with a line that says what the one under the cursor is. */
export function tokenView(tokens, turns, colour) {
  const scale = scaleOf(colour, tokens);
  const readout = h("p", { className: "token-readout", "aria-live": "polite" }, HINT);
  const box = h("div", { className: "tokens", role: "group", tabIndex: 0, "aria-label": "Response, token by token; arrows move" });
  const more = h("button", { type: "button" });
  let drawn = 0;
  let chosen = -1;
  const starts = new Map();
  const opened = (number) => (number ? "another conversation" : "in place of the prompt");
  const name = (turn, number) => (turn.opens ? `${turn.author}, ${opened(number)}` : turn.author);
  turns.reduce((start, turn, number) => (starts.set(start, name(turn, number)), start + turn.ids.length), 0);
  const draw = () => {
    const end = Math.min(tokens.length, drawn + AT_ONCE);
    const parts = [];
    for (; drawn < end; drawn += 1) {
      if (turns.length > 1 && starts.has(drawn)) parts.push(h("span", { className: "author" }, plain(starts.get(drawn))));
      parts.push(piece(tokens[drawn], drawn, scale));
    }
    box.append(...parts);
    more.hidden = drawn >= tokens.length;
    more.textContent = `Show ${Math.min(AT_ONCE, tokens.length - drawn)} of ${tokens.length - drawn} more tokens`;
  };
  const choose = (place) => {
    const spans = box.querySelectorAll(".t");
    spans[chosen]?.classList.remove("chosen");
    chosen = place;
    spans[chosen]?.classList.add("chosen");
    readout.textContent = place < 0 ? HINT : described(tokens[place], place);
  };
  more.addEventListener("click", draw);
  box.addEventListener("pointerover", (event) => event.target.dataset?.place && choose(Number(event.target.dataset.place)));
  box.addEventListener("pointerleave", () => choose(-1));
  box.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way || !drawn) return;
    event.preventDefault();
    choose(Math.min(drawn - 1, Math.max(0, chosen + way)));
  });
  draw();
  return h("div", {}, legend(scale), box, more, readout);
}

function legend(scale) {
  if (scale.versions) return h("p", { className: "legend" }, scale.versions.map(([name, text]) => h("span", { className: `t ${name}` }, text)));
  if (!scale.ends) return h("p", { className: "legend" }, scale.legend);
  const both = scale.ends[0] !== "likely";
  const steps = Array.from({ length: 9 }, (_, i) => h("i", { className: shade(both ? (i - 4) / 4 : -(i / 8)) }));
  return h("p", { className: "legend" }, scale.ends[0], h("span", { className: "ramp", "aria-hidden": "true" }, steps), scale.ends[1]);
}

function piece(token, place, scale) {
  const text = token.text ?? `${token.id} `;
  const faded = token.author !== "policy" || token.mask === 0 ? " faded" : "";
  const visible = text === "" ? "·" : text.replace(/\n/g, "↵\n");
  const colour = scale.of && token.version !== undefined ? scale.of(token.version) : shade(scale.value(token));
  return h("span", { className: `t ${colour}${faded}`, "data-place": place }, visible);
}

function described(token, place) {
  const parts = [`token ${place + 1}`, token.text === null ? `id ${token.id}` : `${JSON.stringify(token.text)} (id ${token.id})`];
  if (token.author !== "policy") return [...parts, "not the policy's"].join(" · ");
  if (token.logprob !== undefined) parts.push(`logprob ${fixed(token.logprob, 3)} (p ${fixed(Math.exp(token.logprob), 3)})`);
  if (token.difference !== undefined) parts.push(`learner ${fixed(token.difference, 5)}, ratio ${fixed(Math.exp(token.difference), 5)}`);
  if (typeof token.advantage === "number") parts.push(`advantage ${fixed(token.advantage, 3)}`);
  if (token.mask !== undefined && !Array.isArray(token.mask)) parts.push(token.mask ? "in the loss" : "not in the loss");
  if (token.version !== undefined) parts.push(`policy version ${count(token.version)}${token.age === undefined ? "" : `, ${counted(token.age, "step")} old`}`);
  return parts.join(" · ");
}
