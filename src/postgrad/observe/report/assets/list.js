// A list of any length: only what can be seen is in the document. Arrows move, Enter opens.

import { h } from "./dom.js";

const BEYOND = 6; // rows drawn above and below what is seen
const TALLEST = 12_000_000; // pixels: browsers cut taller elements

export class VirtualList {
  /** draw(item) gives the children of a row; chosen(item, place, entered) hears of a choice. */
  constructor({ label, height, draw, chosen }) {
    Object.assign(this, { height, draw, chosen });
    this.items = [];
    this.active = 0;
    this.id = `list-${(VirtualList.made = (VirtualList.made ?? 0) + 1)}`;
    this.space = h("div", { className: "space", role: "presentation" });
    this.element = h("div", { className: "list", role: "listbox", tabIndex: 0, "aria-label": label }, this.space);
    this.element.addEventListener("scroll", () => this.#later());
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("click", (event) => this.#click(event));
    new ResizeObserver(() => this.#later()).observe(this.element);
  }

  /** Other items; `keep` is the item that stays active where it is among them. */
  show(items, keep) {
    this.items = items;
    const place = keep ? items.indexOf(keep) : -1;
    this.active = place >= 0 ? place : Math.min(this.active, Math.max(0, items.length - 1));
    // a browser's tallest element bounds the rows that scrolling can reach
    this.reachable = Math.min(items.length, Math.floor(TALLEST / this.height));
    this.space.style.height = `${this.reachable * this.height}px`;
    if (place < 0) this.element.scrollTop = 0;
    this.paint();
  }

  paint() {
    const { clientHeight, scrollTop } = this.element;
    const from = Math.max(0, Math.floor(scrollTop / this.height) - BEYOND);
    const to = Math.min(this.reachable, Math.ceil((scrollTop + clientHeight) / this.height) + BEYOND);
    const rows = [];
    for (let place = from; place < to; place += 1) rows.push(this.#row(place));
    this.space.replaceChildren(...rows);
    const active = this.active >= from && this.active < to ? `${this.id}-${this.active}` : "";
    if (active) this.element.setAttribute("aria-activedescendant", active);
    else this.element.removeAttribute("aria-activedescendant");
  }

  #row(place) {
    const row = h(
      "div",
      {
        id: `${this.id}-${place}`,
        className: "row",
        role: "option",
        "aria-selected": place === this.active,
        "aria-setsize": this.items.length,
        "aria-posinset": place + 1,
        "data-place": place,
      },
      this.draw(this.items[place]),
    );
    row.style.top = `${place * this.height}px`;
    return row;
  }

  #later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.paint();
    });
  }

  /** Makes a place the active one, in view, and chooses it. */
  move(place, entered = false) {
    if (!this.items.length) return;
    this.active = Math.min(this.items.length - 1, Math.max(0, place));
    this.reveal();
    this.chosen(this.items[this.active], this.active, entered);
  }

  /** Scrolls to the active place. */
  reveal() {
    const top = this.active * this.height;
    const { clientHeight, scrollTop } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + this.height > scrollTop + clientHeight) this.element.scrollTop = top + this.height - clientHeight;
    this.paint();
  }

  #key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.height) - 1);
    const ways = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const way = ways[event.key];
    if (event.key === "Enter" || event.key === " ") this.move(this.active, true);
    else if (way === undefined) return;
    else this.move(way === -Infinity ? 0 : way === Infinity ? this.items.length - 1 : this.active + way);
    event.preventDefault();
  }

  #click(event) {
    const row = event.target.closest("[data-place]");
    if (row) this.move(Number(row.dataset.place), true);
  }
}
