/* The end of the page, following a run, and the order of it all. */

function buildFoot() {
  const thinned = Math.max(1, ...runs.map((run) => run.every));
  const parts = [
    `Written ${clock(page.written)}`,
    "Drag over a chart to zoom, double-click to see all",
  ];
  if (thinned > 1)
    parts.push(
      `Each point of a curve stands for up to ${whole(thinned)} steps: faint lines reach from the smallest value to the largest`,
    );
  if (page.refresh)
    parts.push(
      isStale
        ? "Nobody writes this page any more: it does not follow the run"
        : "This page follows the run",
    );
  document.getElementById("foot").append(...parts.map((text) => make("span", { text })));
}
/** Load the page again while a run goes on, unless the reader is in the middle of something. */
function follow() {
  if (!page.refresh || isStale) return;
  let isHeld = false;
  addEventListener("pointerdown", () => {
    isHeld = true;
  });
  addEventListener("pointerup", () => {
    isHeld = false;
  });
  setInterval(() => {
    const isBusy =
      isHeld || !tip.hidden || String(getSelection()) || document.querySelector(".find")?.value;
    if (isBusy || document.visibilityState !== "visible") return;
    keepChoice();
    location.reload();
  }, page.refresh * 1000);
}

readChoice();
applyTheme();
document.body.append(tip);
buildBar();
document.getElementById("page").replaceChildren();
if (runs.length) buildHead();
if (!runs.some((run) => run.x.step.length || Object.keys(run.evaluations).length))
  document
    .getElementById("page")
    .append(make("article", { class: "card w12 empty", text: "No step has been logged yet." }));
buildDifferences();
buildCurves();
buildSpeed();
buildData();
buildInside();
buildRest();
buildTables();
buildFoot();
redrawAll();
addEventListener("beforeprint", () => {
  root.dataset.theme = "light";
  root.dataset.print = ""; // the width of a sheet, which curves are drawn for
  colors = {};
  redrawAll();
});
addEventListener("afterprint", () => {
  delete root.dataset.print;
  applyTheme();
  redrawAll();
});
follow();
root.dataset.ready = String(drawn.length);
