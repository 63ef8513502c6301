/* The data of the page, and small helpers. All files are one script, in the order of page.py.
   What came from a run is set as text, never as markup. */

const page = JSON.parse(document.getElementById("runs").textContent);
const runs = page.runs;
const root = document.documentElement;
const several = runs.length > 1;
const RIGHT = 16; // so that the last label of an axis is whole
const GUTTER = 56; // pixels left of every plot, so that all of them align

// A page that is not written any more, as its command has ended, is not loaded again.
const isStale = page.refresh && Date.now() / 1000 - page.written > Math.max(60, 10 * page.refresh);

function make(tag, options, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (value === undefined || value === null) continue;
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else if (name === "on")
      for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
    else if (name === "style")
      for (const [key, x] of Object.entries(value)) node.style.setProperty(key, x);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
function draw(tag, options) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (name === "text") node.textContent = value;
    else node.setAttribute(name, value);
  }
  return node;
}
let colors = {};
const color = (name) =>
  (colors[name] ??= getComputedStyle(root).getPropertyValue(`--${name}`).trim());
const fade = (hex, alpha) =>
  hex +
  Math.round(alpha * 255)
    .toString(16)
    .padStart(2, "0");
const runColor = (index) => `c${index % 8}`;
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const isNumber = (x) => typeof x === "number" && isFinite(x);
