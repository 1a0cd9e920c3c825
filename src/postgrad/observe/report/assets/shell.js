// The frame of the page: header, ways to the sections, light and dark.

import { choice, h } from "./dom.js";

/** A section with a heading, which the navigation knows; of the first one the page's title is enough. */
export function section(id, title, ...children) {
  const heading = h("h2", { id: `${id}-title`, tabIndex: -1, className: id === "overview" ? "unseen" : "" }, title);
  return h("section", { id, "aria-labelledby": `${id}-title` }, heading, ...children);
}

/** Header, navigation and main part around the sections. second: another row of the header. */
export function shell({ title, live }, view, second, sections) {
  const theme = choice([["", "System"], ["light", "Light"], ["dark", "Dark"]], "", (value) => {
    if (value) document.documentElement.dataset.theme = value;
    else delete document.documentElement.dataset.theme;
  });
  theme.setAttribute("aria-label", "Colours of the page");
  const go = (one) => (event) => {
    event.preventDefault(); // the rest of the address stays
    view.set({}, { section: one.id });
    one.scrollIntoView();
    one.querySelector("h2").focus({ preventScroll: true });
  };
  const links = sections.map((one) => h("a", { href: `#${one.id}`, click: go(one) }, one.querySelector("h2").textContent));
  const nav = h("nav", { "aria-label": "Sections" }, links);
  const heading = h("h1", {}, title);
  const status = h("span", { className: "live", role: "status" });
  const parts = [
    h("a", { className: "skip", href: "#main" }, "Skip to the run"),
    h("header", { className: "top" }, h("div", { className: "bar" }, h("span", { className: "brand" }, "postgrad"), nav, live ? status : null, theme), second),
    h("main", { id: "main", tabIndex: -1 }, heading, ...sections),
  ];
  const visible = new Set();
  const mark = () => {
    const current = sections.findIndex((one) => visible.has(one));
    links.forEach((link, i) => {
      if (i !== current) link.removeAttribute("aria-current");
      else if (!link.hasAttribute("aria-current")) {
        link.setAttribute("aria-current", "true");
        nav.scrollLeft = link.offsetLeft - nav.offsetLeft - nav.clientWidth / 3;
      }
    });
  };
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) visible[isIntersecting ? "add" : "delete"](target);
      mark();
    },
    { rootMargin: "-20% 0px -70% 0px" },
  );
  for (const one of sections) seen.observe(one);
  return { parts, status, heading };
}
