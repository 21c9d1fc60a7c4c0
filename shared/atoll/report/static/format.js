/* Numbers as people read them, with their units; an unknown number is a dash, never 0. */

export const NONE = "–";
const SPACE = "\u202f"; // a narrow space that does not break, between a number and its unit

function scaled(value, steps, digits = 3) {
  for (const [scale, unit] of steps) {
    if (Math.abs(value) >= scale) return [trimmed(value / scale, digits), unit];
  }
  return [trimmed(value, digits), ""];
}

function trimmed(value, digits) {
  const size = Math.abs(value);
  const places = size === 0 ? 0 : Math.max(0, Math.min(digits, digits - 1 - Math.floor(Math.log10(size))));
  return value.toLocaleString("en", { maximumFractionDigits: places });
}

const known = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  if (!known(value)) return NONE;
  if (Math.abs(value) < 1e4) return Math.round(value).toLocaleString("en");
  const [number, unit] = scaled(value, [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]);
  return number + SPACE + unit;
}

/* A number at an axis: short, and no more places than it needs. */
export function tick(value) {
  return known(value) ? value.toLocaleString("en", { maximumFractionDigits: 3 }) : NONE;
}

export function ago(value) {
  return known(value) ? `${value < 90 ? trimmed(Math.max(0, value), 2) + SPACE + "s" : clock(value)} ago` : NONE;
}

export function exact(value) {
  return known(value) ? Math.round(value).toLocaleString("en") : NONE;
}

export function bytes(value, per = "") {
  if (!known(value)) return NONE;
  const [number, unit] = scaled(value, [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]);
  return number + SPACE + (unit || "B") + per;
}

export function share(value, places = 1) {
  return known(value) ? (100 * value).toFixed(places) + SPACE + "%" : NONE;
}

/* A share at an axis whose ticks are `step` apart: as many places as tell them apart. */
export function percent(value, step = 0.1) {
  return share(value, Math.max(0, Math.min(4, -Math.floor(Math.log10(100 * step) + 1e-9))));
}

/* A share that may be small: three digits that count. */
export function fraction(value) {
  return known(value) ? trimmed(100 * value, 3) + SPACE + "%" : NONE;
}

export function loss(value) {
  return known(value) ? value.toFixed(3) : NONE;
}

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value !== 0 && Math.abs(value) < 1) return trimmed(1000 * value, 3) + SPACE + "ms";
  return value < 90 ? trimmed(value, 3) + SPACE + "s" : clock(value);
}

/* As `clock`, with the fraction of a second that a short window needs. */
export function fine(value) {
  const whole = Math.floor(value + 1e-6);
  return clock(whole) + (value - whole).toFixed(1).slice(1);
}

/* Seconds since the founding: 0:05, 12:31, 3:07:09; days beyond that. */
export function clock(value) {
  if (!known(value)) return NONE;
  const whole = Math.round(Math.abs(value));
  const [days, hours, minutes, rest] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  const sign = value < -0.5 ? "−" : "";
  if (days) return `${sign}${days}${SPACE}d ${hours}:${two(minutes)}`;
  return sign + (hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`);
}

export function plural(number, one, many = one + "s") {
  return `${exact(number)} ${number === 1 ? one : many}`;
}
