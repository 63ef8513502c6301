/* Cards with curves, which uPlot draws, over one axis that all of them share. */

/** Mean over the steps around, weighted by exp(-distance / window): it does not lag, as a mean of past steps would. */
function smooth(run, name, window) {
  const { v, m } = run.series[name];
  const values = m || v;
  const stride = m ? 2 : 1;
  let out = values;
  if (window > 0) {
    const at = (i) => run.x.step[i * stride];
    const sums = new Float64Array(values.length),
      weights = new Float64Array(values.length);
    for (const step of [1, -1]) {
      let sum = 0,
        weight = 0,
        before = null;
      for (let i = step > 0 ? 0 : values.length - 1; i >= 0 && i < values.length; i += step) {
        if (values[i] === null) continue;
        const keep = before === null ? 0 : Math.exp(-Math.abs(at(i) - at(before)) / window);
        // The value itself counts once, not in both directions.
        sums[i] += sum * keep + (step > 0 ? values[i] : 0);
        weights[i] += weight * keep + (step > 0 ? 1 : 0);
        sum = sum * keep + values[i];
        weight = weight * keep + 1;
        before = i;
      }
    }
    out = values.map((x, i) => (x === null ? null : sums[i] / weights[i]));
  }
  return stride === 1 ? out : out.flatMap((x) => [x, x]);
}
/** A value that stands in few lines joins them; one that is missing for once leaves a gap. */
function bridge(values) {
  const missing = values.reduce((n, x) => n + (x === null), 0);
  return missing > values.length / 2 ? values.map((x) => (x === null ? undefined : x)) : values;
}
function domain() {
  let low = Infinity,
    high = -Infinity;
  runs.forEach((run, index) => {
    const x = run.x[choice.axis];
    if (!isShown(index) || !x || !x.length) return;
    low = Math.min(low, x[0]);
    high = Math.max(high, x.at(-1));
  });
  if (!isFinite(low)) return [0, 1];
  const fromStart = runs.some((run, index) => isShown(index) && run.x.step[0] <= 1);
  if (low > 0 && (fromStart || low < 0.03 * high)) low = 0; // where runs start
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}
const view = () => choice.zoom || domain();

const drawn = []; // everything that has to be drawn anew when a choice changes
function redrawAll() {
  tip.hidden = true;
  for (const item of drawn) item.redraw();
  resetButton.hidden = !choice.zoom;
}
function setZoom(range) {
  const [low, high] = domain();
  if (range) {
    const width = Math.min(range[1] - range[0], high - low);
    const start = Math.min(Math.max(range[0], low), high - width);
    range = width <= 0 || width >= (high - low) * 0.9999 ? null : [start, start + width];
  }
  choice.zoom = range;
  keepChoice();
  for (const item of drawn) item.rescale();
  resetButton.hidden = !choice.zoom;
}

/** Return the range of an axis that shows the bulk of the values, if a few would flatten it. */
function chooseRange(plot, spec) {
  const [first, last] = plot.series[0].idxs || [0, plot.data[0].length - 1];
  const values = [];
  for (let s = 1; s < plot.data.length; s++) {
    for (let i = first; i <= last; i++) if (isNumber(plot.data[s][i])) values.push(plot.data[s][i]);
  }
  if (!values.length) return [0, 1];
  values.sort((a, b) => a - b);
  const at = (share) => values[Math.round(share * (values.length - 1))];
  let low = values[0],
    high = values.at(-1);
  const bulk = at(0.97) - at(0.015);
  if (!spec.all && !spec.log && values.length > 40 && bulk > 0 && high - low > 2.5 * bulk) {
    if (high - at(0.97) > bulk) high = at(0.97) + 0.7 * bulk;
    if (at(0.015) - low > bulk) low = at(0.015) - 0.6 * bulk;
  }
  if (spec.zero) low = Math.min(low, 0);
  if (spec.log && low > 0) return [low / 1.08, high * 1.08];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [spec.zero && low === 0 ? 0 : low - room, high + room];
}

const time = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800,
  345600, 864000,
];
const counts = [1, 2, 5]
  .flatMap((x) => Array.from({ length: 16 }, (_, e) => x * 10 ** e))
  .sort((a, b) => a - b);
const binary = [0, 1, 2, 3, 4].flatMap((e) =>
  [1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128, 200, 256, 500, 512].map(
    (x) => x * 1024 ** e,
  ),
);
function makeAxes(spec) {
  const axis = {
    stroke: () => color("ink-3"),
    font: `11px ${color("sans")}`,
    ticks: { show: false },
    grid: { stroke: () => color("grid"), width: 1 },
  };
  return [
    {
      ...axis,
      size: 24,
      gap: 5,
      space: 64,
      incrs: choice.axis === "time" ? time : counts,
      values: (_, all) => all.map((x) => AXES[choice.axis][1](x)),
    },
    {
      ...axis,
      size: GUTTER,
      gap: 6,
      space: spec.log || spec.low ? 22 : 32,
      ...(spec.format === "bytes" ? { incrs: binary } : {}),
      values: (_, all) => tickLabels(all, spec.format),
    },
  ];
}
/** Ticks of an axis differ by little: as many digits as tell them apart. */
function tickLabels(all, format) {
  const known = all.filter(isNumber);
  if (format !== "plain" || known.length < 2)
    return all.map((x) => (x === null ? "" : FORMATS[format](x)));
  const gap = Math.min(...known.slice(1).map((x, i) => Math.abs(x - known[i])));
  const size = Math.max(...known.map(Math.abs));
  if (size >= 1e5 || size < 1e-3 || gap < 1e-6)
    return all.map((x) => (x === null ? "" : x === 0 ? "0" : short(x)));
  const digits = Math.max(0, Math.ceil(-Math.log10(gap) - 1e-9));
  return all.map((x) => (x === null ? "" : x.toFixed(Math.min(6, digits))));
}

function makeHeader(spec, left, right) {
  return make(
    "header",
    {},
    make(
      "div",
      { class: "left" },
      make("h3", { text: spec.title }),
      spec.unit ? make("span", { class: "unit", text: spec.unit }) : null,
      ...left,
    ),
    right,
  );
}

/** A card with curves over the common axis. `spec.sources` are {run, name, label, color}. */
function curveCard(spec) {
  const plotNode = make("div", { class: "plot", tabindex: "0", role: "img" });
  const right = make("div", { class: "right" });
  const legend = make("div", { class: "legend" });
  const node = make(
    "article",
    { class: `card ${spec.width || ""}`, "data-card": spec.id },
    makeHeader(spec, [legend], right),
    plotNode,
  );
  const item = { spec, node, plot: null, lines: [] };
  if (spec.canLog) {
    const button = make("button", {
      type: "button",
      text: "log",
      title: "Logarithmic axis",
      on: {
        click: () => {
          choice.log = choice.log.includes(spec.id)
            ? choice.log.filter((id) => id !== spec.id)
            : [...choice.log, spec.id];
          keepChoice();
          item.redraw();
        },
      },
    });
    right.append(make("span", { class: "segment small" }, button));
    item.logButton = button;
  }
  if (spec.now) right.append(make("span", { class: "now", text: spec.now }));
  item.redraw = () => {
    spec.log = Boolean(spec.canLog) && choice.log.includes(spec.id);
    item.logButton?.setAttribute("aria-pressed", spec.log);
    if (item.plot) item.plot.destroy();
    const [data, series, lines, bands] = spec.stack ? stackData(spec) : lineData(spec);
    item.lines = lines;
    drawLegend(legend, spec, lines);
    const box = plotNode.getBoundingClientRect();
    item.plot = new uPlot(
      {
        width: Math.max(120, Math.floor(box.width) || 300),
        height: Math.max(90, Math.floor(box.height) || 150),
        padding: [8, RIGHT, 0, 0],
        legend: { show: false },
        bands,
        scales: {
          x: { time: false, range: () => view() },
          y: { distr: spec.log ? 3 : 1, range: (u) => chooseRange(u, spec) },
        },
        axes: makeAxes(spec),
        series,
        cursor: {
          y: false,
          points: { show: false },
          drag: { x: true, y: false, setScale: false },
          sync: { key: "report", scales: ["x", null], setSeries: false },
          bind: {
            dblclick: () => () => {
              setZoom(null);
              return null;
            },
          },
        },
        hooks: {
          setSelect: [
            (u) => {
              if (u.select.width > 3)
                setZoom([
                  u.posToVal(u.select.left, "x"),
                  u.posToVal(u.select.left + u.select.width, "x"),
                ]);
              u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            },
          ],
          setCursor: [
            (u) => {
              if (u === hovered) showValues(item);
            },
          ],
          drawAxes: [(u) => drawMoments(u, spec)],
          draw: [(u) => drawBeyond(u, item)],
        },
      },
      data,
      plotNode,
    );
    item.plot.over.addEventListener("pointerenter", () => {
      hovered = item.plot;
    });
    item.plot.over.addEventListener("pointerleave", () => {
      if (hovered === item.plot) hovered = null;
      tip.hidden = true;
    });
    plotNode.setAttribute("aria-label", describeCard(spec, lines));
  };
  item.rescale = () => item.plot?.setScale("x", { min: view()[0], max: view()[1] });
  plotNode.addEventListener("keydown", (event) => steer(event, item));
  plotNode.addEventListener("blur", () => {
    tip.hidden = true;
  });
  new ResizeObserver(([entry]) => {
    const { width, height } = entry.contentRect;
    if (
      item.plot &&
      width > 0 &&
      (Math.floor(width) !== item.plot.width || Math.floor(height) !== item.plot.height)
    ) {
      item.plot.setSize({ width: Math.floor(width), height: Math.floor(height) });
      item.resized?.();
    }
  }).observe(plotNode);
  drawn.push(item);
  return item;
}

function lineData(spec) {
  const tables = [],
    series = [{}],
    lines = [];
  const add = (options) =>
    series.push({ spanGaps: false, points: { show: longest < 30, size: 4 }, ...options });
  spec.sources.forEach((source) => {
    const index = runs.indexOf(source.run);
    const x = source.run.x[choice.axis];
    const found = source.run.series[source.name];
    if (!isShown(index) || !x || !found) return;
    const stroke = () => color(source.color);
    const isLight = !spec.exact && (choice.window > 0 || found.m);
    const table = [x, bridge(found.v)];
    add({
      stroke: () =>
        isLight ? fade(color(source.color), several ? 0.2 : 0.3) : color(source.color),
      width: isLight ? 1 : 1.5,
      dash: source.dash,
    });
    if (isLight) {
      table.push(bridge(smooth(source.run, source.name, choice.window)));
      add({ stroke, width: 1.75, dash: source.dash });
    }
    lines.push({ ...source, at: series.length - 1 });
    tables.push(table);
  });
  for (const { run, name, label, color: tone } of spec.evaluations || []) {
    const found = run.evaluations[name];
    if (!isShown(runs.indexOf(run)) || !found) continue;
    const rows = found.x
      .map((x, i) => [x[AXIS_INDEX[choice.axis]], found.v[i]])
      .filter(([x, v]) => isNumber(x) && v !== null)
      .sort((a, b) => a[0] - b[0]);
    if (!rows.length) continue;
    tables.push([rows.map((row) => row[0]), rows.map((row) => row[1])]);
    const many = rows.length > 80;
    add({
      stroke: () => color(tone),
      width: 1.25,
      dash: [4, 3],
      points: {
        show: !many || (several === false && rows.length < 200),
        size: 6,
        stroke: () => color(tone),
        fill: () => color("card"),
        width: 1.5,
      },
    });
    lines.push({ run, name, label, color: tone, at: series.length - 1, isEvaluation: true });
  }
  if (!tables.length)
    return [
      [
        [0, 1],
        [null, null],
      ],
      [{}, { show: false }],
      [],
      undefined,
    ];
  return [tables.length > 1 ? uPlot.join(tables) : tables[0], series, lines, undefined];
}

/** Curves on top of each other; the sum is drawn first, and smaller sums over it. */
function stackData(spec) {
  const shown = spec.sources.filter(
    (source) => isShown(runs.indexOf(source.run)) && source.run.x[choice.axis],
  );
  if (!shown.length)
    return [
      [
        [0, 1],
        [null, null],
      ],
      [{}, { show: false }],
      [],
      undefined,
    ];
  let x = shown[0].run.x[choice.axis];
  let below = new Array(x.length).fill(0);
  const layers = shown.map((source) => {
    const values = smooth(source.run, source.name, choice.window);
    below = below.map((sum, i) => (sum === null || values[i] === null ? sum : sum + values[i]));
    return { source, sums: below, values };
  });
  if (spec.share)
    for (const layer of layers)
      layer.sums = layer.sums.map((sum, i) => (below[i] > 0 ? sum / below[i] : null));
  if (x.length === 1) {
    // one step has no width of its own
    x = [view()[0], x[0]];
    for (const layer of layers)
      [layer.sums, layer.values] = [layer.sums, layer.values].map(([value]) => [value, value]);
    below = [below[0], below[0]];
  }
  const data = [x],
    series = [{}],
    lines = [];
  for (const { source, sums, values } of [...layers].reverse()) {
    data.push(sums);
    series.push({
      width: 0,
      fill: () => mix(color("card"), color(source.color), 0.72),
      points: { show: false },
    });
    lines.unshift({ ...source, at: series.length - 1, values });
  }
  if (spec.share)
    for (const line of lines)
      line.values = line.values.map((value, i) =>
        below[i] > 0 && value !== null ? value / below[i] : null,
      );
  return [data, series, lines, undefined];
}

function drawLegend(node, spec, lines) {
  node.replaceChildren();
  if (lines.length < 2 && !spec.stack) return;
  if (runs.length > 3 && !spec.stack && spec.id !== "loss") return; // the table of runs has their colours
  const entries = several
    ? lines.filter((line) => !line.isEvaluation || !spec.sources.length)
    : lines;
  for (const line of entries) {
    const total = spec.totals?.[line.name];
    node.append(
      make(
        "span",
        {},
        make("i", {
          class: spec.stack ? "swatch" : "swatch line",
          style: {
            background: spec.stack
              ? `color-mix(in srgb, var(--${line.color}) 72%, var(--card))`
              : `var(--${line.color})`,
          },
        }),
        make("bdi", { text: line.label }),
        total ? make("b", { text: total }) : null,
      ),
    );
  }
  if (entries.length < lines.length) node.append(make("span", { text: heldOut }));
}
const heldOut = "dashed: held out";
function describeCard(spec, lines) {
  const parts = lines.map((line) => {
    const values = (
      line.isEvaluation ? line.run.evaluations[line.name].v : line.run.series[line.name].v
    ).filter(isNumber);
    const format = FORMATS[spec.format];
    return values.length
      ? `${line.label}: from ${format(values[0])} to ${format(values.at(-1))}`
      : line.label;
  });
  return `${spec.title} by ${choice.axis}. ${parts.join("; ")}. Arrow keys move the cursor, plus and minus zoom, 0 shows all.`;
}

/** Vertical lines where a run restarted, went back or failed: the same in every chart. */
function drawMoments(u, spec) {
  const context = u.ctx;
  const { left, top, width, height } = u.bbox;
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  runs.forEach((run, index) => {
    if (!isShown(index) || !spec.sources.some((source) => source.run === run)) return;
    if (several && spec.id !== "loss") return; // the lines of several runs hide the curves of small charts
    for (const event of run.events) {
      if (!MOMENTS.includes(event.kind)) continue;
      const at = event.x[AXIS_INDEX[choice.axis]];
      if (!isNumber(at)) continue;
      const x = Math.round(u.valToPos(at, "x", true));
      context.strokeStyle = fade(
        several ? color(runColor(index)) : color(KINDS[event.kind][1]),
        several ? 0.35 : 0.5,
      );
      context.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      context.lineWidth = devicePixelRatio;
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
    }
  });
  context.restore();
}
/** Small triangles at the edge for values beyond it, and marks for steps that were not taken. */
function drawBeyond(u, item) {
  const context = u.ctx,
    ratio = devicePixelRatio;
  const { left, top, width } = u.bbox;
  const limit = u.scales.y.max;
  context.save();
  for (const line of item.spec.stack ? [] : item.lines) {
    const values =
      u.data[line.isEvaluation ? line.at : line.at - (u.series[line.at - 1]?.width === 1 ? 1 : 0)];
    let last = -Infinity;
    const [first, end] = u.series[0].idxs || [0, -1];
    for (let i = first; i <= end; i++) {
      if (!(values[i] > limit)) continue;
      const x = u.valToPos(u.data[0][i], "x", true);
      if (x - last < 7 * ratio || x < left || x > left + width) continue;
      last = x;
      triangle(context, x, top + 1 * ratio, 3.5 * ratio, color(line.color), true);
    }
  }
  if (item.spec.marks) {
    runs.forEach((run, index) => {
      if (!isShown(index)) return;
      let last = -Infinity;
      for (const mark of run.marks) {
        if (!item.spec.marks.includes(mark.kind)) continue;
        const at = mark.x[AXIS_INDEX[choice.axis]];
        const x = isNumber(at) ? u.valToPos(at, "x", true) : NaN;
        if (!(x >= left && x <= left + width) || x - last < 5 * ratio) continue;
        last = x;
        cross(
          context,
          x,
          top + u.bbox.height - 6 * ratio,
          3.2 * ratio,
          color(mark.kind === "nonfinite" ? "bad" : "warn"),
        );
      }
    });
  }
  context.restore();
}
function triangle(context, x, y, size, fill) {
  context.fillStyle = fill;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x - size, y + 1.5 * size);
  context.lineTo(x + size, y + 1.5 * size);
  context.fill();
}
function cross(context, x, y, size, stroke) {
  context.strokeStyle = stroke;
  context.lineWidth = 1.6 * devicePixelRatio;
  context.setLineDash([]);
  context.beginPath();
  context.moveTo(x - size, y - size);
  context.lineTo(x + size, y + size);
  context.moveTo(x + size, y - size);
  context.lineTo(x - size, y + size);
  context.stroke();
}
