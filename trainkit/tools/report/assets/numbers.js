/* Numbers as text: with as many digits and the unit that a reader wants. */

function short(x, digits = 3) {
  if (!isNumber(x)) return "–";
  const size = Math.abs(x);
  for (const [unit, scale] of [
    ["T", 1e12],
    ["B", 1e9],
    ["M", 1e6],
    ["k", 1e3],
  ]) {
    if (size >= scale * 0.9999) return trim((x / scale).toPrecision(digits)) + unit;
  }
  return trim(size !== 0 && size < 1e-3 ? x.toExponential(1) : x.toPrecision(digits + 1));
}
const trim = (text) =>
  text.includes("e")
    ? text.replace(/\.?0+e/, "e")
    : text.includes(".")
      ? text.replace(/\.?0+$/, "")
      : text;
const whole = (x) => (isNumber(x) ? Math.round(x).toLocaleString("en-US") : "–");
function bytes(x) {
  if (!isNumber(x)) return "–";
  for (const [unit, scale] of [
    ["TiB", 2 ** 40],
    ["GiB", 2 ** 30],
    ["MiB", 2 ** 20],
    ["KiB", 1024],
  ]) {
    if (Math.abs(x) >= scale) return `${trim((x / scale).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(x)} B`;
}
function percent(x) {
  if (!isNumber(x)) return "–";
  if (x && Math.abs(x) < 1e-4) return `${trim((100 * x).toPrecision(2))} %`;
  return `${trim((100 * x).toFixed(Math.abs(x) < 0.1 ? 2 : 1))} %`;
}
function seconds(x) {
  if (!isNumber(x)) return "–";
  const size = Math.abs(x);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${trim((x * 1e6).toPrecision(3))} µs`;
  if (size < 1) return `${trim((x * 1e3).toPrecision(3))} ms`;
  return size < 120 ? `${trim(x.toPrecision(3))} s` : duration(x);
}
function duration(x) {
  if (!isNumber(x)) return "–";
  const minutes = Math.floor(x / 60);
  if (x < 60) return `${Math.round(x)} s`;
  if (minutes < 60)
    return `${minutes} min${x % 60 >= 1 && minutes < 10 ? ` ${Math.floor(x % 60)} s` : ""}`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h${minutes % 60 ? ` ${minutes % 60} min` : ""}`;
  return `${Math.floor(hours / 24)} d${hours % 24 ? ` ${hours % 24} h` : ""}`;
}
function elapsed(x) {
  if (x === 0) return "0";
  if (x < 60) return `${trim(x.toPrecision(3))} s`;
  if (x < 3600) return `${trim((x / 60).toPrecision(3))} min`;
  return x < 172800
    ? `${trim((x / 3600).toPrecision(3))} h`
    : `${trim((x / 86400).toPrecision(3))} d`;
}
const clock = (unix) =>
  new Date(unix * 1000).toLocaleString("en-GB", {
    day: "numeric",
    month: "short",
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
  });
const plain = (x) =>
  isNumber(x)
    ? Math.abs(x) >= 1e5 || (x && Math.abs(x) < 1e-3)
      ? short(x, 4)
      : trim(x.toPrecision(5))
    : "–";
const FORMATS = { plain, short, bytes, percent, seconds };
