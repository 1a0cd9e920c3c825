// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Four significant digits, thousands grouped, a true minus. */
export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return minus(value.toExponential(2));
  if (size >= 1000) return minus(Math.round(value).toLocaleString("en-US"));
  return minus(String(Number(value.toPrecision(4))));
}

/** A number with so many decimals. */
export function fixed(value, digits) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  return minus(value.toFixed(digits)).replace(/^−(0(\.0+)?)$/, "$1");
}

export function count(value) {
  return typeof value === "number" ? value.toLocaleString("en-US") : "–";
}

/** "3 samples", "1 sample". */
export function counted(n, what) {
  return `${count(n)} ${what}${n === 1 ? "" : "s"}`;
}

/** "7 min 28 s", "0.23 s". */
export function seconds(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value < 10) return `${Number(value.toPrecision(3))} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function bytes(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${Number(value.toPrecision(3))} ${UNITS[unit]}`;
}

/** The ends of an interval, "accuracy_low" or "accuracy_low/DATASET"; a reward or dataset may be called so too. */
export const ENDS = /^([^/]+)_(low|high)(?=\/|$)/;

/** A metric's value in the unit that its name says; a reward has any name and no unit. */
export function measured(name, value) {
  if (/(^|\/)reward\//.test(name)) return number(value);
  if (name.endsWith("_bytes")) return bytes(value);
  if (name.endsWith("_seconds")) return seconds(value);
  return number(value);
}

export function percent(value) {
  return `${fixed(100 * value, value < 0.0995 ? 1 : 0)}%`;
}

/** Whatever JSON holds, as text. */
export function plain(value) {
  if (typeof value === "string") return value;
  return value === undefined ? "" : JSON.stringify(value);
}

/** Text on one line, no longer than `most` characters. */
export function preview(text, most) {
  const line = plain(text ?? "").slice(0, 2 * most).replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most)}…` : line;
}

function minus(text) {
  return text.replace("-", "−").replace("e+", "e");
}
