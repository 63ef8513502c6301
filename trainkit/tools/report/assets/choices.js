/* What the reader has chosen, which the address holds: axis, zoom, smoothing, theme. */

const AXES = {
  step: ["Step", short, whole],
  tokens: ["Tokens", short, short],
  time: ["Time", elapsed, duration],
};
const AXIS_INDEX = { step: 0, tokens: 1, time: 2 };
const WINDOWS = [0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
const longest = Math.max(
  1,
  ...runs.map((run) => run.x.step.length && run.x.step.at(-1) - run.x.step[0]),
);
const usable = Object.keys(AXES).filter(
  (name) =>
    name === "step" || (runs.length && runs.every((run) => !run.x.step.length || run.x[name])),
);
// Wide enough for the noise, and narrow beside the bend of a loss at the start.
const defaultWindow =
  longest < 60 ? 0 : WINDOWS.filter((x) => x <= 0.7 * Math.sqrt(longest)).at(-1);
const choice = {
  axis: "step",
  zoom: null,
  window: defaultWindow,
  log: [],
  off: [],
  theme: null,
  layer: null,
};

function readChoice() {
  let text = location.hash.slice(1);
  if (!text.includes("=")) {
    try {
      text = sessionStorage.getItem("report") || "";
    } catch {
      text = "";
    }
  }
  const found = new URLSearchParams(text);
  if (usable.includes(found.get("x"))) choice.axis = found.get("x");
  const zoom = (found.get("z") || "").split("~").map(Number);
  if (zoom.length === 2 && zoom.every(isFinite) && zoom[0] < zoom[1]) choice.zoom = zoom;
  if (found.has("s") && WINDOWS.includes(Number(found.get("s"))))
    choice.window = Number(found.get("s"));
  if (found.get("l")) choice.log = found.get("l").split(",");
  if (found.get("off")) choice.off = found.get("off").split(",").map(Number);
  if (["dark", "light"].includes(found.get("t"))) choice.theme = found.get("t");
  if (found.get("y")) choice.layer = found.get("y");
}
function keepChoice() {
  const text = new URLSearchParams({ x: choice.axis });
  if (choice.zoom) text.set("z", choice.zoom.map((x) => Number(x.toPrecision(8))).join("~"));
  if (choice.window !== defaultWindow) text.set("s", choice.window);
  if (choice.log.length) text.set("l", choice.log.join(","));
  if (choice.off.length) text.set("off", choice.off.join(","));
  if (choice.theme) text.set("t", choice.theme);
  if (choice.layer) text.set("y", choice.layer);
  // An address of a file cannot be changed otherwise; this does not load the page again.
  location.replace(`#${text}`);
  try {
    sessionStorage.setItem("report", String(text));
  } catch {
    /* the address has it */
  }
}
const system = matchMedia("(prefers-color-scheme: dark)");
function applyTheme() {
  root.dataset.theme = choice.theme || (system.matches ? "dark" : "light");
  colors = {};
}
system.addEventListener("change", () => {
  applyTheme();
  redrawAll();
});
const isShown = (index) => !choice.off.includes(index);
