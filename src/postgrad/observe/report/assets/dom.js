// Elements from text. Text is only ever set as text: nothing here can make markup of it.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `properties` with a dash or of `ROLES` are attributes, functions are listeners. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same in SVG, where all properties are attributes. */
export function svg(tag, properties = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name.includes("-") || ROLES.has(name)) element.setAttribute(name, String(value));
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const ROLES = new Set(["role", "for", "list", "scope", "colspan"]);

/** A table with a caption; `columns` are {name, number}, cells are text or elements. */
export function table(caption, columns, rows, { hidden = false } = {}) {
  const head = columns.map((one) =>
    h("th", { scope: "col", className: one.number ? "number" : "" }, one.name),
  );
  const body = rows.map((row) =>
    h(
      "tr",
      {},
      row.map((cell, place) => {
        const properties = { className: columns[place].number ? "number" : "" };
        return place === 0
          ? h("th", { ...properties, scope: "row" }, cell)
          : h("td", properties, cell);
      }),
    ),
  );
  return h(
    "div",
    { className: "scrolls", role: "region", "aria-label": caption, tabIndex: 0 },
    h(
      "table",
      {},
      h("caption", { className: hidden ? "unseen" : "" }, caption),
      h("thead", {}, h("tr", {}, head)),
      h("tbody", {}, body),
    ),
  );
}

let fields = 0;

/** A control with its label, which is text or elements. */
export function field(label, control) {
  fields += 1;
  control.id = `field-${fields}`;
  return h("div", { className: "field" }, h("label", { for: control.id }, label), control);
}

/** A <select> of [value, text] pairs; of an unknown value it shows the first. */
export function choice(pairs, value, changed) {
  const options = pairs.map(([key, text]) => h("option", { value: key }, text));
  const element = h("select", { change: () => changed(element.value) }, options);
  element.value = pairs.some(([key]) => key === value) ? value : pairs[0][0];
  return element;
}

/** A search box that is kept in the view under `key`. */
export function searchBox(view, key, placeholder) {
  const input = h("input", { type: "search", value: view.get(key), placeholder, autocomplete: "off", spellcheck: false });
  input.addEventListener("input", settled(() => view.set({ [key]: input.value }), 120));
  view.listen([key], () => {
    if (document.activeElement !== input) input.value = view.get(key);
  });
  return input;
}

/** Runs `work` once `wait` milliseconds after the last call. */
export function settled(work, wait) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, wait);
  };
}
