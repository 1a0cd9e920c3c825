// Arithmetic of curves: pure functions over arrays.

/** Exponential moving average whose weights sum to one from the first value on; NaN is skipped. */
export function smooth(values, weight) {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (Number.isNaN(value)) return NaN;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/** Indices of at most about `most` points that keep every peak: the extremes of each bucket. */
export function thin(values, most) {
  if (values.length <= most) return values.map((_, i) => i);
  const found = [];
  const buckets = Math.ceil(most / 2);
  for (let bucket = 0; bucket < buckets; bucket += 1) {
    const from = Math.floor((bucket * values.length) / buckets);
    const to = Math.floor(((bucket + 1) * values.length) / buckets);
    let low = -1;
    let high = -1;
    for (let i = from; i < to; i += 1) {
      if (Number.isNaN(values[i])) continue;
      if (low < 0 || values[i] < values[low]) low = i;
      if (high < 0 || values[i] > values[high]) high = i;
    }
    if (low >= 0) found.push(...(low === high ? [low] : [Math.min(low, high), Math.max(low, high)]));
  }
  return found;
}

/** [least, most] of finite numbers, widened a little, never empty. */
export function extent(lists) {
  let low = Infinity;
  let high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return [0, 1];
  if (low === high) {
    const around = Math.abs(low) / 10 || 1;
    return [low - around, high + around];
  }
  const room = (high - low) * 0.06;
  return [low - room, high + room];
}

/** About `wanted` round numbers within [low, high]. */
export function ticks(low, high, wanted) {
  for (let rough = (high - low) / wanted; ; rough /= 2) {
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) {
      found.push(Number((n * step).toPrecision(12)));
    }
    if (found.length > 1) return found; // one tick says nothing
  }
}

/** Ticks with just the digits that tell them apart. */
export function labels(values) {
  const step = values.length > 1 ? Math.abs(values[1] - values[0]) : Math.abs(values[0]) || 1;
  const largest = Math.max(...values.map(Math.abs), step);
  if (largest >= 1e5 || largest < 1e-3) {
    return values.map((v) => (v === 0 ? "0" : v.toExponential(digitsOf(v, step)).replace("e+", "e")));
  }
  const digits = Math.max(0, Math.min(8, -Math.floor(Math.log10(step) + 1e-9)));
  return values.map((value) => value.toFixed(digits));
}

function digitsOf(value, step) {
  const apart = Math.floor(Math.log10(Math.abs(value)) + 1e-9) - Math.floor(Math.log10(step) + 1e-9);
  return Math.max(0, Math.min(4, apart));
}

/** The values whose x is in [from, to], and those of the line at both ends; xs is ascending. */
export function within(xs, ys, from, to) {
  const found = [];
  for (let i = 0; i < xs.length; i += 1) {
    if (xs[i] >= from && xs[i] <= to) found.push(ys[i]);
    for (const end of [from, to]) {
      if (i && xs[i - 1] < end && xs[i] > end) found.push(ys[i - 1] + ((ys[i] - ys[i - 1]) * (end - xs[i - 1])) / (xs[i] - xs[i - 1]));
    }
  }
  return found;
}

/** The index whose x is nearest; x is ascending. */
export function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

/** True where there is a curve to show: two values at least. */
export function moves(values) {
  const first = values.find((value) => !Number.isNaN(value));
  return values.some((value) => !Number.isNaN(value) && value !== first);
}

export function median(values) {
  const known = values.filter((value) => !Number.isNaN(value)).sort((a, b) => a - b);
  if (!known.length) return NaN;
  const middle = known.length >> 1;
  return known.length % 2 ? known[middle] : (known[middle - 1] + known[middle]) / 2;
}

/** The last known value. */
export function last(values) {
  for (let i = values.length - 1; i >= 0; i -= 1) if (!Number.isNaN(values[i])) return values[i];
  return NaN;
}
