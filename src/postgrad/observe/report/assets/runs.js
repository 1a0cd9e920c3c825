// The second row of the header: which runs are shown and what they are called, and the zoom.

import { h } from "./dom.js";
import { count } from "./format.js";

export class RunBar {
  constructor(store, view, zoom) {
    Object.assign(this, { store, view, zoom });
    this.renaming = null;
    this.runs = h("div", { className: "chips", role: "group", "aria-label": "Runs" });
    this.zoomed = h("button", { type: "button", className: "chip zoomed", title: "Reset zoom", click: () => zoom.reset() });
    this.element = h("div", { className: "bar second" }, this.runs, this.zoomed);
    store.listen((told) => (told.has("run") ? this.update() : 0));
    view.listen(["zoom", "over"], () => this.update());
    this.update();
  }

  update() {
    const range = this.zoom.range(this.zoom.axis);
    this.zoomed.hidden = !range;
    const [from, to] = (range ?? []).map(count);
    this.zoomed.textContent = range ? `${this.zoom.axis === "step" ? "steps" : "seconds"} ${from} to ${to} ✕ reset zoom` : "no zoom";
    this.runs.hidden = !this.store.many;
    this.element.hidden = !range && !this.store.many;
    if (this.store.many && this.renaming === null) this.runs.replaceChildren(...this.store.all.map((run) => this.#chip(run)));
  }

  #chip(run) {
    const { store } = this;
    const shown = store.runs.includes(run);
    const box = h("input", { type: "checkbox", checked: shown, disabled: shown && store.runs.length === 1, "aria-label": `Show ${run.name}` });
    box.addEventListener("change", () => {
      store.hide(run, !box.checked);
      this.runs.children[run.number].querySelector("input").focus();
    });
    const chip = h("span", { className: `chip c${run.number}${shown ? "" : " off"}` });
    const rename = h("button", { type: "button", className: "icon", "aria-label": `Rename ${run.name}`, title: "Rename", click: () => this.#rename(run, chip) }, "✎");
    chip.append(h("label", { className: "run-name" }, box, run.name), rename);
    return chip;
  }

  #rename(run, chip) {
    this.renaming = run;
    const input = h("input", { type: "text", value: run.name, maxLength: 60, "aria-label": `New name of ${run.name}; empty: its own` });
    const end = (name) => {
      if (this.renaming === null) return;
      this.renaming = null;
      if (name !== null) this.store.rename(run, name);
      this.update();
    };
    const close = (name) => {
      end(name);
      this.runs.children[run.number].querySelector("button").focus();
    };
    input.addEventListener("blur", () => end(input.value));
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault(); // else Enter would press the button that gets the focus
      close(event.key === "Enter" ? input.value : null);
    });
    chip.replaceChildren(input);
    input.select();
    input.focus();
  }
}
