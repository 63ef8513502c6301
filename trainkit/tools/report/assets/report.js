/* Draws the page from the JSON in #runs. All that came from a run is set as text, never as markup. */
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("runs").textContent);
  const runs = page.runs;
  const root = document.documentElement;
  const several = runs.length > 1;
  const RIGHT = 16; // so that the last label of an axis is whole
  const GUTTER = 56; // pixels left of every plot, so that all of them align

  // A page that is not written any more, as its command has ended, is not loaded again.
  const isStale = page.refresh && Date.now() / 1000 - page.written > Math.max(60, 10 * page.refresh);

  // ---------------------------------------------------------------- small helpers

  function make(tag, options, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(options || {})) {
      if (value === undefined || value === null) continue;
      if (name === "text") node.textContent = value;
      else if (name === "class") node.className = value;
      else if (name === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
      else if (name === "style") for (const [key, x] of Object.entries(value)) node.style.setProperty(key, x);
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
  const color = (name) => (colors[name] ??= getComputedStyle(root).getPropertyValue(`--${name}`).trim());
  const fade = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
  const runColor = (index) => `c${index % 8}`;
  const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
  const isNumber = (x) => typeof x === "number" && isFinite(x);

  // ---------------------------------------------------------------- numbers as text

  function short(x, digits = 3) {
    if (!isNumber(x)) return "–";
    const size = Math.abs(x);
    for (const [unit, scale] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
      if (size >= scale * 0.9999) return trim((x / scale).toPrecision(digits)) + unit;
    }
    return trim(size !== 0 && size < 1e-3 ? x.toExponential(1) : x.toPrecision(digits + 1));
  }
  const trim = (text) => (text.includes("e") ? text.replace(/\.?0+e/, "e") : text.includes(".") ? text.replace(/\.?0+$/, "") : text);
  const whole = (x) => (isNumber(x) ? Math.round(x).toLocaleString("en-US") : "–");
  function bytes(x) {
    if (!isNumber(x)) return "–";
    for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) {
      if (Math.abs(x) >= scale) return `${trim((x / scale).toPrecision(3))} ${unit}`;
    }
    return `${Math.round(x)} B`;
  }
  const percent = (x) => (isNumber(x) ? `${trim((100 * x).toFixed(Math.abs(x) < 0.1 ? 2 : 1))} %` : "–");
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
    if (minutes < 60) return `${minutes} min${x % 60 >= 1 && minutes < 10 ? ` ${Math.floor(x % 60)} s` : ""}`;
    const hours = Math.floor(minutes / 60);
    if (hours < 48) return `${hours} h${minutes % 60 ? ` ${minutes % 60} min` : ""}`;
    return `${Math.floor(hours / 24)} d${hours % 24 ? ` ${hours % 24} h` : ""}`;
  }
  function elapsed(x) {
    if (x === 0) return "0";
    if (x < 60) return `${trim(x.toPrecision(3))} s`;
    if (x < 3600) return `${trim((x / 60).toPrecision(3))} min`;
    return x < 172800 ? `${trim((x / 3600).toPrecision(3))} h` : `${trim((x / 86400).toPrecision(3))} d`;
  }
  const clock = (unix) => new Date(unix * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const plain = (x) => (isNumber(x) ? (Math.abs(x) >= 1e5 || (x && Math.abs(x) < 1e-3) ? short(x, 4) : trim(x.toPrecision(5))) : "–");
  const FORMATS = { plain, short, bytes, percent, seconds };

  // ---------------------------------------------------------------- what the reader has chosen

  const AXES = { step: ["Step", short, whole], tokens: ["Tokens", short, short], time: ["Time", elapsed, duration] };
  const AXIS_INDEX = { step: 0, tokens: 1, time: 2 };
  const WINDOWS = [0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
  const longest = Math.max(1, ...runs.map((run) => run.x.step.length && run.x.step.at(-1) - run.x.step[0]));
  const usable = Object.keys(AXES).filter((name) => name === "step" || (runs.length && runs.every((run) => !run.x.step.length || run.x[name])));
  const defaultWindow = longest < 60 ? 0 : WINDOWS.filter((x) => x <= longest / 150).at(-1);
  const choice = { axis: "step", zoom: null, window: defaultWindow, log: [], off: [], theme: null, layer: null };

  function readChoice() {
    let text = location.hash.slice(1);
    if (!text.includes("=")) {
      try { text = sessionStorage.getItem("report") || ""; } catch { text = ""; }
    }
    const found = new URLSearchParams(text);
    if (usable.includes(found.get("x"))) choice.axis = found.get("x");
    const zoom = (found.get("z") || "").split("~").map(Number);
    if (zoom.length === 2 && zoom.every(isFinite) && zoom[0] < zoom[1]) choice.zoom = zoom;
    if (found.has("s") && WINDOWS.includes(Number(found.get("s")))) choice.window = Number(found.get("s"));
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
    try { sessionStorage.setItem("report", String(text)); } catch { /* the address has it */ }
  }
  const system = matchMedia("(prefers-color-scheme: dark)");
  function applyTheme() {
    root.dataset.theme = choice.theme || (system.matches ? "dark" : "light");
    colors = {};
  }
  system.addEventListener("change", () => { applyTheme(); redrawAll(); });
  const isShown = (index) => !choice.off.includes(index);

  // ---------------------------------------------------------------- curves

  /** Mean over the steps around, weighted by exp(-distance / window): it does not lag, as a mean of past steps would. */
  function smooth(run, name, window) {
    const { v, m } = run.series[name];
    const values = m || v;
    const stride = m ? 2 : 1;
    let out = values;
    if (window > 0) {
      const at = (i) => run.x.step[i * stride];
      const sums = new Float64Array(values.length), weights = new Float64Array(values.length);
      for (const step of [1, -1]) {
        let sum = 0, weight = 0, before = null;
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
    let low = Infinity, high = -Infinity;
    runs.forEach((run, index) => {
      const x = run.x[choice.axis];
      if (!isShown(index) || !x || !x.length) return;
      low = Math.min(low, x[0]);
      high = Math.max(high, x.at(-1));
    });
    if (!isFinite(low)) return [0, 1];
    if (low > 0 && (choice.axis === "time" || low < 0.03 * high)) low = 0; // where runs start
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
    let low = values[0], high = values.at(-1);
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

  const time = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 345600, 864000];
  const counts = [1, 2, 5].flatMap((x) => Array.from({ length: 16 }, (_, e) => x * 10 ** e)).sort((a, b) => a - b);
  const binary = [0, 1, 2, 3, 4].flatMap((e) => [1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128, 200, 256, 500, 512].map((x) => x * 1024 ** e));
  function makeAxes(spec) {
    const axis = { stroke: () => color("ink-3"), font: `11px ${color("sans")}`, ticks: { show: false }, grid: { stroke: () => color("grid"), width: 1 } };
    return [
      { ...axis, size: 24, gap: 5, space: 64, incrs: choice.axis === "time" ? time : counts, values: (_, all) => all.map((x) => AXES[choice.axis][1](x)) },
      { ...axis, size: GUTTER, gap: 6, space: spec.log || spec.low ? 22 : 32, ...(spec.format === "bytes" ? { incrs: binary } : {}), values: (_, all) => tickLabels(all, spec.format) },
    ];
  }
  /** Ticks of an axis differ by little: as many digits as tell them apart. */
  function tickLabels(all, format) {
    const known = all.filter(isNumber);
    if (format !== "plain" || known.length < 2) return all.map((x) => (x === null ? "" : FORMATS[format](x)));
    const gap = Math.min(...known.slice(1).map((x, i) => Math.abs(x - known[i])));
    const size = Math.max(...known.map(Math.abs));
    if (size >= 1e5 || size < 1e-3 || gap < 1e-6) return all.map((x) => (x === null ? "" : x === 0 ? "0" : short(x)));
    const digits = Math.max(0, Math.ceil(-Math.log10(gap) - 1e-9));
    return all.map((x) => (x === null ? "" : x.toFixed(Math.min(6, digits))));
  }

  function makeHeader(spec, left, right) {
    return make("header", {}, make("div", { class: "left" }, make("h3", { text: spec.title }), spec.unit ? make("span", { class: "unit", text: spec.unit }) : null, ...left), right);
  }

  /** A card with curves over the common axis. `spec.sources` are {run, name, label, color}. */
  function curveCard(spec) {
    const plotNode = make("div", { class: "plot", tabindex: "0", role: "img" });
    const right = make("div", { class: "right" });
    const legend = make("div", { class: "legend" });
    const node = make("article", { class: `card ${spec.width || ""}`, "data-card": spec.id },
      makeHeader(spec, [legend], right), plotNode);
    const item = { spec, node, plot: null, lines: [] };
    if (spec.canLog) {
      const button = make("button", { type: "button", text: "log", title: "Logarithmic axis", on: { click: () => {
        choice.log = choice.log.includes(spec.id) ? choice.log.filter((id) => id !== spec.id) : [...choice.log, spec.id];
        keepChoice();
        item.redraw();
      } } });
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
      item.plot = new uPlot({
        width: Math.max(120, Math.floor(box.width) || 300), height: Math.max(90, Math.floor(box.height) || 150),
        padding: [8, RIGHT, 0, 0], legend: { show: false }, bands,
        scales: { x: { time: false, range: () => view() }, y: { distr: spec.log ? 3 : 1, range: (u) => chooseRange(u, spec) } },
        axes: makeAxes(spec), series,
        cursor: {
          y: false, points: { show: false }, drag: { x: true, y: false, setScale: false },
          sync: { key: "report", scales: ["x", null], setSeries: false }, bind: { dblclick: () => () => { setZoom(null); return null; } },
        },
        hooks: {
          setSelect: [(u) => {
            if (u.select.width > 3) setZoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
            u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          }],
          setCursor: [(u) => { if (u === hovered) showValues(item); }],
          drawAxes: [(u) => drawMoments(u, spec)],
          draw: [(u) => drawBeyond(u, item)],
        },
      }, data, plotNode);
      item.plot.over.addEventListener("pointerenter", () => { hovered = item.plot; });
      item.plot.over.addEventListener("pointerleave", () => { if (hovered === item.plot) hovered = null; tip.hidden = true; });
      plotNode.setAttribute("aria-label", describeCard(spec, lines));
    };
    item.rescale = () => item.plot?.setScale("x", { min: view()[0], max: view()[1] });
    plotNode.addEventListener("keydown", (event) => steer(event, item));
    plotNode.addEventListener("blur", () => { tip.hidden = true; });
    new ResizeObserver(([entry]) => {
      const { width, height } = entry.contentRect;
      if (item.plot && width > 0 && (Math.floor(width) !== item.plot.width || Math.floor(height) !== item.plot.height)) {
        item.plot.setSize({ width: Math.floor(width), height: Math.floor(height) });
        item.resized?.();
      }
    }).observe(plotNode);
    drawn.push(item);
    return item;
  }

  function lineData(spec) {
    const tables = [], series = [{}], lines = [];
    const add = (options) => series.push({ spanGaps: false, points: { show: longest < 30, size: 4 }, ...options });
    spec.sources.forEach((source) => {
      const index = runs.indexOf(source.run);
      const x = source.run.x[choice.axis];
      const found = source.run.series[source.name];
      if (!isShown(index) || !x || !found) return;
      const stroke = () => color(source.color);
      const isLight = !spec.exact && (choice.window > 0 || found.m);
      const table = [x, bridge(found.v)];
      add({ stroke: () => (isLight ? fade(color(source.color), several ? 0.2 : 0.3) : color(source.color)), width: isLight ? 1 : 1.5, dash: source.dash });
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
      const rows = found.x.map((x, i) => [x[AXIS_INDEX[choice.axis]], found.v[i]]).filter(([x, v]) => isNumber(x) && v !== null).sort((a, b) => a[0] - b[0]);
      if (!rows.length) continue;
      tables.push([rows.map((row) => row[0]), rows.map((row) => row[1])]);
      const many = rows.length > 80;
      add({ stroke: () => color(tone), width: 1.25, dash: [4, 3], points: { show: !many || several === false && rows.length < 200, size: 6, stroke: () => color(tone), fill: () => color("card"), width: 1.5 } });
      lines.push({ run, name, label, color: tone, at: series.length - 1, isEvaluation: true });
    }
    if (!tables.length) return [[[0, 1], [null, null]], [{}, { show: false }], [], undefined];
    return [tables.length > 1 ? uPlot.join(tables) : tables[0], series, lines, undefined];
  }

  /** Curves on top of each other; the sum is drawn first, and smaller sums over it. */
  function stackData(spec) {
    const shown = spec.sources.filter((source) => isShown(runs.indexOf(source.run)) && source.run.x[choice.axis]);
    if (!shown.length) return [[[0, 1], [null, null]], [{}, { show: false }], [], undefined];
    let x = shown[0].run.x[choice.axis];
    let below = new Array(x.length).fill(0);
    const layers = shown.map((source) => {
      const values = smooth(source.run, source.name, choice.window);
      below = below.map((sum, i) => (sum === null || values[i] === null ? sum : sum + values[i]));
      return { source, sums: below, values };
    });
    if (spec.share) for (const layer of layers) layer.sums = layer.sums.map((sum, i) => (below[i] > 0 ? sum / below[i] : null));
    if (x.length === 1) { // one step has no width of its own
      x = [x[0] - 0.25, x[0] + 0.25];
      for (const layer of layers) [layer.sums, layer.values] = [layer.sums, layer.values].map(([value]) => [value, value]);
      below = [below[0], below[0]];
    }
    const data = [x], series = [{}], lines = [];
    for (const { source, sums, values } of [...layers].reverse()) {
      data.push(sums);
      series.push({ width: 0, fill: () => mix(color("card"), color(source.color), 0.72), points: { show: false } });
      lines.unshift({ ...source, at: series.length - 1, values });
    }
    if (spec.share) for (const line of lines) line.values = line.values.map((value, i) => (below[i] > 0 && value !== null ? value / below[i] : null));
    return [data, series, lines, undefined];
  }

  function drawLegend(node, spec, lines) {
    node.replaceChildren();
    if (lines.length < 2 && !spec.stack) return;
    if (runs.length > 3 && !spec.stack && spec.id !== "loss") return; // the table of runs has their colours
    const entries = several ? lines.filter((line) => !line.isEvaluation || !spec.sources.length) : lines;
    for (const line of entries) {
      const total = spec.totals?.[line.name];
      node.append(make("span", {}, make("i", { class: spec.stack ? "swatch" : "swatch line", style: { background: spec.stack ? `color-mix(in srgb, var(--${line.color}) 72%, var(--card))` : `var(--${line.color})` } }),
        make("bdi", { text: line.label }), total ? make("b", { text: total }) : null));
    }
    if (entries.length < lines.length) node.append(make("span", { text: heldOut }));
  }
  const heldOut = "dashed: held out";
  function describeCard(spec, lines) {
    const parts = lines.map((line) => {
      const values = (line.isEvaluation ? line.run.evaluations[line.name].v : line.run.series[line.name].v).filter(isNumber);
      const format = FORMATS[spec.format];
      return values.length ? `${line.label}: from ${format(values[0])} to ${format(values.at(-1))}` : line.label;
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
        context.strokeStyle = fade(several ? color(runColor(index)) : color(KINDS[event.kind][1]), several ? 0.35 : 0.5);
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
    const context = u.ctx, ratio = devicePixelRatio;
    const { left, top, width } = u.bbox;
    const limit = u.scales.y.max;
    context.save();
    for (const line of item.spec.stack ? [] : item.lines) {
      const values = u.data[line.isEvaluation ? line.at : line.at - (u.series[line.at - 1]?.width === 1 ? 1 : 0)];
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
          cross(context, x, top + u.bbox.height - 6 * ratio, 3.2 * ratio, color(mark.kind === "nonfinite" ? "bad" : "warn"));
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

  // ---------------------------------------------------------------- the tip, the keys

  const tip = make("div", { class: "tip", hidden: "", role: "status" });
  let hovered = null;
  function placeTip(x, y) {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - box.height - 8))}px`;
  }
  function tipLine(tone, label, value) {
    return make("div", { class: "line" }, tone ? make("i", { class: "swatch", style: { background: `var(--${tone})` } }) : null, make("bdi", { text: label }), make("b", { text: value }));
  }
  function showValues(item) {
    const { plot, spec, lines } = item;
    const index = plot.cursor.idx;
    if (index === null || index === undefined || plot.cursor.left < 0) { tip.hidden = true; return; }
    const at = plot.data[0][index];
    const near = (values, reach) => {
      for (let i = index; i >= Math.max(0, index - reach); i--) if (isNumber(values[i])) return values[i];
      return null;
    };
    const rows = lines.map((line) => [line, near(spec.stack ? line.values : plot.data[line.at], line.isEvaluation ? Infinity : 60)]).filter(([, value]) => value !== null);
    const format = FORMATS[spec.format];
    const total = spec.stack && !spec.share ? [tipLine(null, "in all", format(rows.reduce((sum, [, value]) => sum + value, 0)))] : [];
    tip.replaceChildren(make("h4", { text: `${AXES[choice.axis][0].toLowerCase()} ${AXES[choice.axis][2](at)}` }, ),
      ...(spec.stack ? rows.reverse() : rows).slice(0, 14).map(([line, value]) => tipLine(line.color, line.label, format(value))), ...total);
    const box = plot.over.getBoundingClientRect();
    placeTip(box.left + plot.cursor.left, box.top + (plot.cursor.top >= 0 ? plot.cursor.top : box.height / 3));
  }
  function steer(event, item) {
    const [low, high] = view();
    const width = high - low;
    const { plot } = item;
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (step && event.shiftKey) setZoom([low + step * width * 0.2, high + step * width * 0.2]);
    else if (step) {
      const [first, last] = plot.series[0].idxs;
      const now = plot.cursor.left >= 0 && plot.cursor.idx !== null ? plot.cursor.idx : step > 0 ? first - 1 : last + 1;
      const next = Math.min(last, Math.max(first, now + step * Math.max(1, Math.round((last - first) / 200))));
      hovered = plot;
      plot.setCursor({ left: plot.valToPos(plot.data[0][next], "x"), top: 10 });
      showValues(item);
    } else if (event.key === "+" || event.key === "=") setZoom([low + width * 0.2, high - width * 0.2]);
    else if (event.key === "-") setZoom([low - width / 3, high + width / 3]);
    else if (event.key === "0" || event.key === "Escape") setZoom(null);
    else return;
    event.preventDefault();
  }

  // ---------------------------------------------------------------- events

  // kind: [row of the lane, colour, shape, whether it is drawn small]
  const KINDS = {
    start: ["run", "ink-2", "play"], restart: ["run", "accent", "play"], ranks: ["run", "c4", "play"], stop: ["run", "ink-2", "square"], end: ["run", "ink-2", "square"], failure: ["run", "bad", "square"],
    save: ["saves", "good", "dot"], "save failed": ["saves", "bad", "cross"], evaluation: ["evals", "c1", "diamond"], sample: ["samples", "c3", "ring"],
    skip: ["steps", "warn", "cross"], spike: ["steps", "warn", "up"], rollback: ["steps", "bad", "back"], rewind: ["steps", "ink-3", "back"], divergence: ["steps", "bad", "up"], nonfinite: ["steps", "bad", "cross"],
    control: ["notes", "c4", "ring"], profile: ["notes", "c4", "diamond"], straggler: ["notes", "warn", "dot"], health: ["notes", "warn", "up"], warning: ["notes", "warn", "up"],
  };
  const MOMENTS = ["restart", "ranks", "rollback", "failure", "divergence"];
  const SHAPES = {
    play: "M-3.5-4.5 L4.5 0 L-3.5 4.5Z", back: "M3.5-4.5 L-4.5 0 L3.5 4.5Z", square: "M-3.5-3.5H3.5V3.5H-3.5Z", dot: "M-2.6 0a2.6 2.6 0 1 0 5.2 0a2.6 2.6 0 1 0-5.2 0Z",
    ring: "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0Z", diamond: "M0-4.2L4.2 0L0 4.2L-4.2 0Z", up: "M0-4.2L4.4 3.6H-4.4Z", cross: "M-3.2-3.2L3.2 3.2M3.2-3.2L-3.2 3.2",
  };
  const QUIET = ["resume", "packing", "memory", "host", "startup", "result", "rollout"]; // in the table, not on the lane
  const LANES = ["run", "steps", "saves", "evals", "samples", "notes"];
  const kindOf = (event) => KINDS[event.kind] || ["notes", "ink-3", "ring"];
  function glyph(kind, tone) {
    const [, own, shape] = KINDS[kind] || ["notes", "ink-3", "ring"];
    const node = draw("path", { d: SHAPES[shape] });
    const paint = `var(--${tone || own})`;
    node.style.fill = ["ring", "cross"].includes(shape) ? "none" : paint;
    node.style.stroke = ["ring", "cross"].includes(shape) ? paint : "none";
    node.style.strokeWidth = shape === "cross" ? "1.7" : "1.4";
    return node;
  }
  function glyphIcon(kind) {
    const svg = draw("svg", { width: 12, height: 12, viewBox: "-6 -6 12 12", "aria-hidden": "true" });
    svg.append(glyph(kind));
    return svg;
  }
  function eventsOf(run) {
    const marks = run.marks.filter((mark) => mark.kind === "nonfinite").map((mark) => ({ t: mark.t, x: mark.x, kind: "nonfinite", text: Object.entries(mark.values).map(([name, value]) => `${name} is ${value}`).join(", ") }));
    return [...run.events, ...marks];
  }

  /** The events of the runs under a chart, on its axis. */
  function addLane(item) {
    const rows = several ? runs.map((run) => run.name) : LANES.filter((lane) => eventsOf(runs[0]).some((event) => !QUIET.includes(event.kind) && kindOf(event)[0] === lane));
    const hidden = several ? [...QUIET, "save", "evaluation", "sample"] : QUIET; // a row holds all of a run
    const all = runs.flatMap((run, index) => eventsOf(run).filter((event) => !hidden.includes(event.kind)).map((event) => ({ event, index })));
    if (!all.length) return;
    const height = 19;
    const svg = draw("svg", { height: rows.length * height, role: "img", "aria-label": `${all.length} events; the table below lists them` });
    const present = Object.keys(KINDS).filter((kind) => all.some(({ event }) => event.kind === kind));
    const keys = make("div", { class: "keys" }, ...present.map((kind) => make("span", {}, glyphIcon(kind), document.createTextNode(kind === "nonfinite" ? "not finite" : kind))));
    item.node.append(make("div", { class: "lane" }, svg), keys);
    const lane = { rescale: () => lane.redraw() };
    lane.redraw = () => {
      svg.replaceChildren();
      const plot = item.plot;
      const left = GUTTER, width = plot.width - GUTTER - RIGHT; // uPlot places its parts later
      rows.forEach((name, row) => {
        const y = (row + 0.5) * height;
        svg.append(draw("line", { class: "row", x1: left, x2: left + width + 6, y1: y, y2: y }));
        const label = draw("text", { x: left - 11, y: y + 3.5, "text-anchor": "end", text: name.length > 9 ? `${name.slice(0, 8)}…` : name });
        svg.append(label);
      });
      const [low, high] = view();
      for (const { event, index } of all) {
        const at = event.x[AXIS_INDEX[choice.axis]];
        if (!isNumber(at) || at < low || at > high || !isShown(index)) continue;
        const row = several ? index : rows.indexOf(kindOf(event)[0]);
        const mark = glyph(event.kind);
        mark.setAttribute("class", "mark");
        mark.setAttribute("transform", `translate(${(left + ((at - low) / (high - low)) * width).toFixed(1)} ${(row + 0.5) * height})`);
        mark.addEventListener("pointerenter", (pointer) => {
          tip.replaceChildren(make("h4", { text: event.kind }, make("span", { text: `step ${whole(event.x[0])}` })), event.text ? make("p", { text: event.text.slice(0, 400) }) : null, make("p", { text: [several ? runs[index].name : "", event.t ? clock(event.t) : ""].filter(Boolean).join(" · ") }));
          placeTip(pointer.clientX, pointer.clientY);
        });
        mark.addEventListener("pointerleave", () => { tip.hidden = true; });
        svg.append(mark);
      }
    };
    item.resized = lane.redraw;
    drawn.push(lane);
  }

  function eventTable() {
    const all = runs.flatMap((run, index) => eventsOf(run).map((event) => ({ event, index }))).sort((a, b) => (b.event.t ?? 0) - (a.event.t ?? 0) || b.event.x[0] - a.event.x[0]);
    if (!all.length) return null;
    const order = Object.keys(KINDS);
    const kinds = [...new Set(all.map(({ event }) => event.kind))].sort((a, b) => (order.indexOf(a) + 1 || 99) - (order.indexOf(b) + 1 || 99));
    const rare = kinds.filter((kind) => !["save", "evaluation", "sample"].includes(kind));
    let shown = new Set(all.length > 40 && rare.length ? rare : kinds);
    const body = make("tbody");
    const fill = () => {
      body.replaceChildren(...all.filter(({ event }) => shown.has(event.kind)).slice(0, 400).map(({ event, index }) => make("tr", {},
        make("td", { class: "n", text: whole(event.x[0]) }),
        make("td", { class: "s", text: event.t ? clock(event.t) : "" }),
        several ? make("td", { class: "s" }, make("span", { class: "kind" }, make("i", { class: "swatch", style: { background: `var(--${runColor(index)})` } }), make("bdi", { text: runs[index].name }))) : null,
        make("td", { class: "s" }, make("span", { class: "kind" }, glyphIcon(event.kind), make("bdi", { text: event.kind === "nonfinite" ? "not finite" : event.kind }))),
        make("td", { class: "wrap", text: event.text }))));
    };
    const chips = make("div", { class: "chips" }, ...kinds.map((kind) => make("button", { type: "button", "aria-pressed": String(shown.has(kind)), text: `${kind === "nonfinite" ? "not finite" : kind} ${all.filter(({ event }) => event.kind === kind).length}`, on: { click: (click) => {
      if (shown.has(kind)) shown.delete(kind); else shown.add(kind);
      click.currentTarget.setAttribute("aria-pressed", String(shown.has(kind)));
      fill();
    } } })));
    fill();
    return make("article", { class: "card w12" }, chips, make("div", { class: "limit scroll", tabindex: "0" }, make("table", { class: "events" },
      make("thead", {}, make("tr", {}, make("th", { class: "n", text: "step" }), make("th", { text: "time" }), several ? make("th", { text: "run" }) : null, make("th", { text: "event" }), make("th", { text: "" }))), body)));
  }

  // ---------------------------------------------------------------- heat maps

  function mix(from, to, share) {
    const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const [a, b] = [parts(from), parts(to)];
    return `rgb(${a.map((x, i) => Math.round(x + (b[i] - x) * share)).join(",")})`;
  }
  const ramp = (share) => (share < 0.5 ? mix(color("low"), color("mid"), 2 * share) : mix(color("mid"), color("high"), 2 * share - 1));
  const diverge = (share) => (share < 0.5 ? mix(color("cold"), color("zero"), 2 * share) : mix(color("zero"), color("hot"), 2 * share - 1));

  /** A card with a matrix over the common axis: `get()` returns {x, rows, values, scale, format}. */
  function heatCard(spec) {
    const canvas = make("canvas", { role: "img", "aria-label": spec.title });
    const bar = make("span", { class: "ramp" });
    const node = make("article", { class: `card ${spec.width}`, "data-card": spec.id },
      makeHeader(spec, spec.controls || [], make("div", { class: "right" }, bar)), make("div", { class: "heat" }, canvas));
    const item = { node, rescale: () => item.redraw() };
    let placed = null;
    item.redraw = () => {
      const { x, end, rows, values, kind, format, groups } = spec.get();
      const width = Math.floor(canvas.parentNode.clientWidth);
      if (!width) return;
      const gutter = Math.min(width < 500 ? 110 : 190, 14 + 6.2 * Math.max(...(groups || rows).map((name) => (name.label || name).length)));
      const size = Math.max(3, Math.min(20, (spec.height || 300) / rows.length));
      const height = Math.ceil(size * rows.length) + 22;
      const ratio = devicePixelRatio;
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      canvas.style.height = `${height}px`;
      const context = canvas.getContext("2d");
      context.scale(ratio, ratio);
      const [low, high] = view();
      const inner = width - gutter - RIGHT + 4; // it ends where curves end
      const place = (value) => gutter + ((value - low) / (high - low)) * inner;
      const edges = [...x, end];
      const shown = values.flatMap((column, i) => (edges[i + 1] > low && edges[i] < high ? column : [])).filter((v) => v !== null);
      const scale = makeScale(shown, kind);
      context.save();
      context.beginPath();
      context.rect(gutter, 0, inner, size * rows.length);
      context.clip();
      context.fillStyle = color("grid");
      context.fillRect(gutter, 0, inner, size * rows.length);
      values.forEach((column, i) => {
        const left = Math.floor(place(edges[i])), right = Math.ceil(place(edges[i + 1]));
        if (right < gutter || left > gutter + inner) return;
        column.forEach((value, row) => {
          if (value === null) return;
          context.fillStyle = scale.paint(value);
          context.fillRect(left, Math.floor(row * size), Math.max(1, right - left), Math.ceil((row + 1) * size) - Math.floor(row * size));
        });
      });
      context.restore();
      context.fillStyle = color("ink-3");
      context.font = `11px ${color("sans")}`;
      context.textBaseline = "middle";
      context.textAlign = "right";
      const every = Math.ceil(13 / size);
      const most = Math.floor((gutter - 10) / 6);
      if (!groups) rows.forEach((name, row) => {
        if (row % every === 0) context.fillText(name.length > most ? `…${name.slice(1 - most)}` : name, gutter - 8, Math.max(6, (row + 0.5) * size));
      });
      for (const { label, first, count } of groups || []) {
        context.fillStyle = color("ink-3");
        context.fillText(label, gutter - 8, (first + count / 2) * size);
        context.fillStyle = color("card");
        if (first) context.fillRect(0, first * size - 1.5, width, 3);
      }
      context.fillStyle = color("ink-3");
      drawTicks(context, place, inner, size * rows.length);
      const steps = [0, 0.25, 0.5, 0.75, 1].map((share) => scale.tone(share));
      bar.replaceChildren(make("span", { text: FORMATS[format](scale.low) }), make("i", { style: { background: `linear-gradient(90deg, ${steps.join(",")})` } }), make("span", { text: FORMATS[format](scale.high) }));
      placed = { edges, gutter, inner, width, size, rows, values, format, low, high };
    };
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const [px, py] = [event.clientX - box.left, event.clientY - box.top];
      const row = Math.floor(py / placed.size);
      const at = placed.low + ((px - placed.gutter) / placed.inner) * (placed.high - placed.low);
      let column = -1;
      while (column + 1 < placed.values.length && placed.edges[column + 1] <= at) column++;
      if (px < placed.gutter || row < 0 || row >= placed.rows.length || column < 0 || at > placed.edges.at(-1)) { tip.hidden = true; return; }
      const value = placed.values[column][row];
      tip.replaceChildren(make("h4", { text: placed.rows[row] }), tipLine(null, `${choice.axis} ${AXES[choice.axis][2](placed.edges[column])}`, value === null ? "–" : FORMATS[placed.format](value)));
      placeTip(event.clientX, event.clientY);
    });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    canvas.addEventListener("dblclick", () => setZoom(null));
    new ResizeObserver(() => { if (placed && Math.floor(canvas.parentNode.clientWidth) !== placed.width) item.redraw(); }).observe(node);
    drawn.push(item);
    return item;
  }
  function makeScale(values, kind) {
    const known = [...values].sort((a, b) => a - b);
    if (kind === "diverging") return { low: 0, high: 2, tone: diverge, paint: (v) => diverge(Math.min(1, Math.max(0, v / 2))) };
    const positive = known.filter((v) => v > 0);
    if (kind === "log" && positive.length) {
      const low = positive[Math.floor(positive.length * 0.01)], high = Math.max(positive.at(-1), low * 1.01);
      return { low, high, tone: ramp, paint: (v) => ramp(v <= 0 ? 0 : Math.min(1, Math.max(0, Math.log(v / low) / Math.log(high / low)))) };
    }
    const low = Math.min(0, known[0] ?? 0), high = known.at(-1) > low ? known.at(-1) : low + 1;
    return { low, high, tone: ramp, paint: (v) => ramp((v - low) / (high - low)) };
  }
  function drawTicks(context, place, inner, y) {
    const [low, high] = view();
    const wanted = (high - low) / Math.max(2, inner / 70);
    const step = (choice.axis === "time" ? time : counts).find((x) => x >= wanted) || wanted;
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) {
      context.fillText(AXES[choice.axis][1](at), place(at), y + 15);
    }
  }

  // ---------------------------------------------------------------- the parts of the page

  const has = (name) => runs.some((run) => run.series[name]);
  const isSame = (list, get) => new Set(list.map((run) => JSON.stringify(get(run)))).size <= 1;
  const namesWith = (prefix) => [...new Set(runs.flatMap((run) => Object.keys(run.series).filter((name) => name.startsWith(prefix))))];
  const lastOf = (run, name) => run.series[name]?.v.findLast(isNumber);
  /** How far values reach around their middle: nobody looks at a curve that does not move. */
  const spread = (series) => {
    const values = (series?.v || []).filter(isNumber).sort((a, b) => a - b);
    return values.length ? (values.at(-1) - values[0]) / (Math.abs(values[values.length >> 1]) || 1) : 0;
  };
  const sourcesOf = (name) => runs.map((run, index) => ({ run, name, label: several ? run.name : name, color: runColor(index), dash: index > 7 ? [6, 3] : undefined })).filter(({ run }) => run.series[name]); // eight colours
  const usedNames = new Set();
  function simpleCard(id, title, unit, format, name, options) {
    usedNames.add(name);
    if (!has(name)) return null;
    const now = several ? null : FORMATS[format](lastOf(runs[0], name));
    return curveCard({ id, title, unit, format, sources: sourcesOf(name), now, ...options });
  }
  function pairCard(id, title, unit, format, pairs, options) {
    for (const [name] of pairs) usedNames.add(name);
    const known = pairs.filter(([name]) => has(name) && (!several || name === options.main));
    if (!known.length) return null;
    if (several) unit = `${known[0][1]}${unit ? `, ${unit}` : ""}`;
    const sources = known.flatMap(([name, label], at) => sourcesOf(name).map((source) => ({ ...source, label: several ? source.label : label, color: several ? source.color : runColor(at) })));
    if (known.length === 1 && !several) options = { ...options, now: FORMATS[format](lastOf(runs[0], known[0][0])) };
    return curveCard({ id, title, unit, format, sources, ...options });
  }

  function addSection(id, title, items) {
    const nodes = items.filter(Boolean).map((item) => item.node || item);
    if (!nodes.length) return;
    const grid = make("div", { class: "grid" }, ...arrange(nodes));
    document.getElementById("page").append(make("section", { id }, make("h2", { text: title }), grid));
    nav.append(make("a", { href: "#", text: title, on: { click: (event) => { event.preventDefault(); document.getElementById(id).scrollIntoView(); } } }));
  }
  /** Return cards in rows of twelve columns without a hole: wide ones first, then what is beside and below them. */
  function arrange(nodes) {
    const isTall = nodes[0].classList.contains("tall"); // two cards stand beside it
    const ordered = nodes.slice(0, isTall ? 3 : 0);
    const rest = nodes.slice(ordered.length);
    const loose = rest.filter((node) => !/\bw\d/.test(node.className));
    const row = (count, width) => {
      for (const node of loose.splice(0, count)) {
        node.classList.add(`w${width / count}`);
        ordered.push(node);
      }
    };
    const halves = rest.filter((node) => node.classList.contains("w6"));
    for (const node of rest) {
      if (!/\bw\d/.test(node.className) || ordered.includes(node)) continue;
      ordered.push(node);
      const isAlone = node === halves.at(-1) && halves.length % 2 === 1;
      if (node.classList.contains("w8")) loose.length ? row(1, 4) : node.classList.replace("w8", "w12");
      else if (isAlone) loose.length ? row(loose.length % 3 === 2 ? 2 : 1, 6) : node.classList.replace("w6", "w12");
    }
    if (loose.length % 3 === 1 && loose.length > 1) row(4, 12);
    else if (loose.length % 3) row(loose.length % 3, 12);
    while (loose.length) row(3, 12);
    return ordered;
  }

  const nav = make("nav", { class: "nav", "aria-label": "Sections" });
  const resetButton = make("button", { class: "plain", type: "button", text: "Show all", title: "Undo the zoom (double-click)", hidden: "", on: { click: () => setZoom(null) } });
  function buildBar() {
    const buttons = Object.entries(AXES).map(([name, [label]]) => {
      const button = make("button", { type: "button", text: label, "aria-pressed": String(choice.axis === name), on: { click: () => {
        if (choice.axis === name) return;
        choice.zoom = convertZoom(choice.zoom, choice.axis, name);
        choice.axis = name;
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
        keepChoice();
        redrawAll();
      } } });
      button.disabled = !usable.includes(name);
      return button;
    });
    const output = make("output", {});
    const slider = make("input", { type: "range", min: 0, max: WINDOWS.length - 1, step: 1, value: WINDOWS.indexOf(choice.window), "aria-label": "Smoothing, in steps", id: "smoothing" });
    const label = () => { output.textContent = choice.window ? `${short(choice.window)} steps` : "off"; };
    slider.addEventListener("input", () => {
      choice.window = WINDOWS[slider.value];
      label();
      redrawAll();
    });
    slider.addEventListener("change", keepChoice);
    label();
    const theme = make("button", { class: "plain icon", type: "button", "aria-label": "Dark or light", title: "Dark or light", id: "theme", on: { click: () => {
      choice.theme = root.dataset.theme === "dark" ? "light" : "dark";
      applyTheme();
      keepChoice();
      redrawAll();
    } } });
    const moon = draw("svg", { width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true" });
    moon.append(draw("circle", { cx: 8, cy: 8, r: 5.6, fill: "none", stroke: "currentColor", "stroke-width": 1.4 }), draw("path", { d: "M8 2.4a5.6 5.6 0 0 1 0 11.2Z", fill: "currentColor" }));
    theme.append(moon);
    const logo = draw("svg", { width: 18, height: 18, viewBox: "0 0 18 18", "aria-hidden": "true" });
    const curve = draw("path", { d: "M2 2.5C3.5 11 7 14.6 16 15.4", fill: "none", "stroke-width": 2.2, "stroke-linecap": "round" });
    curve.style.stroke = "var(--accent)";
    logo.append(draw("path", { d: "M2 2.5V15.6H16", fill: "none", stroke: "currentColor", "stroke-width": 1.2, opacity: 0.35 }), curve);
    document.getElementById("bar").append(make("div", {}, make("span", { class: "brand" }, logo, document.createTextNode("trainkit")), nav,
      make("div", { class: "controls" }, resetButton, make("label", { class: "slide" }, document.createTextNode("Smoothing"), slider, output),
        make("span", { class: "segment", role: "group", "aria-label": "Horizontal axis" }, ...buttons), theme)));
  }
  /** The same lines of the first run, on another axis. */
  function convertZoom(zoom, from, to) {
    const run = runs.find((each, index) => isShown(index) && each.x.step.length && each.x[from] && each.x[to]);
    if (!zoom || !run) return null;
    const find = (value) => {
      const i = run.x[from].findIndex((x) => x >= value);
      return run.x[to][i < 0 ? run.x[to].length - 1 : i];
    };
    const [low, high] = zoom.map(find);
    return low < high ? [low, high] : null;
  }

  function buildHead() {
    const head = document.getElementById("page");
    document.title = page.title;
    const pill = (run) => make("span", { class: `pill ${run.state.kind}`, text: run.state.text });
    if (several) {
      head.append(make("div", { class: "hero" }, make("h1", {}, make("bdi", { text: page.title }))), runTable(pill));
      return;
    }
    const [run] = runs;
    const facts = [...run.facts, ...(run.numbers.ranks ? [["ranks", String(run.numbers.ranks)]] : []), ...(run.start ? [["started", clock(run.start)]] : [])];
    head.append(make("div", { class: "hero" }, make("h1", {}, make("bdi", { text: page.title })), pill(run),
      make("dl", { class: "facts" }, ...facts.map(([label, value]) => make("div", {}, make("dt", { text: label }), make("dd", { text: value }))))));
    const tiles = listTiles(run);
    if (tiles.length > 1) head.append(make("div", { class: "tiles", style: { "--tiles": tiles.length } }, ...tiles));
  }
  function listTiles(run) {
    const n = run.numbers;
    const tiles = [];
    const add = (label, value, unit, sub, tone, more) => tiles.push(make("div", { class: "tile" }, make("div", { class: "label", text: label }),
      make("div", { class: `value ${tone || ""}` }, document.createTextNode(value), unit ? make("small", { text: unit }) : null), make("div", { class: "sub", text: sub || "\u00a0", title: more || sub || "" })));
    const split = (text) => [text.split(" ")[0], text.split(" ").slice(1).join(" ")];
    add("Step", whole(n.step), "", n.last ? `of ${whole(n.last)} · ${Math.floor((100 * n.step) / n.last)} %` : "");
    if (n.last) tiles[0].append(make("div", { class: "progress" }, make("i", { style: { width: `${Math.min(100, (100 * n.step) / n.last)}%` } })));
    const losses = run.series.loss?.v || [];
    if (losses.length) {
      const bad = losses.at(-1) === null;
      add("Training loss", bad ? "not finite" : (n.loss ?? NaN).toFixed(4), "", n.loss === null ? "" : `perplexity ${short(Math.exp(Math.min(20, n.loss)))}`, bad ? "bad" : "");
    }
    if (n.evaluation !== null) {
      const found = run.evaluations["eval/loss"];
      const best = found.v.reduce((low, v, i) => (v !== null && (low < 0 || v < found.v[low]) ? i : low), -1);
      add("Held-out loss", n.evaluation.toFixed(4), "", best >= 0 ? `best ${found.v[best].toFixed(4)}` : "", "", best >= 0 ? `at step ${whole(found.x[best][0])}` : "");
    }
    if (n.tokens !== null) add("Tokens", short(n.tokens), "", n.tokens_per_second ? `${short(n.tokens_per_second)} a second` : "");
    if (n.seconds) add("Step time", ...split(seconds(n.seconds)), "median of the last 100");
    if (n.mfu) add("MFU", ...split(percent(n.mfu)), n.hfu ? `HFU ${percent(n.hfu)}` : "");
    if (n.memory) add("Memory peak", ...split(bytes(n.memory)), n.memory_rank !== null ? `on rank ${n.memory_rank}` : "of a rank");
    const left = run.state.kind === "running" && n.last && n.seconds ? (n.last - n.step) * n.seconds : null;
    if (n.wall) add("Time", duration(n.wall), "", left ? `${duration(left)} left` : `goodput ${percent(n.share)}`, "", `goodput ${percent(n.share)}, ${n.starts} starts, ${n.repeated} steps repeated, ${n.saves} saves`);
    return tiles;
  }
  function runTable(pill) {
    const columns = [
      ["step", (n) => (n.last ? `${whole(n.step)} / ${whole(n.last)}` : whole(n.step))], ["loss", (n) => (n.loss === null ? "–" : n.loss.toFixed(4)), (n) => n.loss], ["held out", (n) => (n.evaluation === null ? "–" : n.evaluation.toFixed(4)), (n) => n.evaluation],
      ["tokens", (n) => short(n.tokens)], ["tokens/s", (n) => short(n.tokens_per_second), (n) => -n.tokens_per_second], ["step time", (n) => seconds(n.seconds)], ["MFU", (n) => percent(n.mfu), (n) => -n.mfu], ["memory", (n) => bytes(n.memory), (n) => n.memory],
      ["time", (n) => duration(n.wall)], ["goodput", (n) => percent(n.share), (n) => -n.share],
    ].filter(([, show]) => runs.some((run) => show(run.numbers) !== "–"));
    const best = columns.map(([, , rank]) => {
      const ranks = rank ? runs.map((run) => rank(run.numbers)).filter((x) => isNumber(x) && x !== 0) : [];
      return ranks.length > 1 && new Set(ranks).size > 1 ? Math.min(...ranks) : null;
    });
    const rows = runs.map((run, index) => {
      const button = make("button", { type: "button", title: "Show or hide", "aria-pressed": String(isShown(index)) }, make("i", { class: "swatch", style: { background: `var(--${runColor(index)})` } }), make("bdi", { text: run.name }));
      const row = make("tr", { class: isShown(index) ? "" : "off" }, make("th", { scope: "row" }, button), make("td", {}, pill(run)),
        ...columns.map(([, show, rank], c) => make("td", { class: `n ${best[c] !== null && rank(run.numbers) === best[c] ? "best" : ""}`, text: show(run.numbers) })));
      button.addEventListener("click", () => {
        choice.off = isShown(index) ? [...choice.off, index] : choice.off.filter((other) => other !== index);
        row.className = isShown(index) ? "" : "off";
        button.setAttribute("aria-pressed", String(isShown(index)));
        keepChoice();
        redrawAll();
      });
      return row;
    });
    return make("article", { class: "card w12 scroll" }, make("table", { class: "runs" }, make("thead", {}, make("tr", {}, make("th", { text: "run" }), make("th", { text: "state" }), ...columns.map(([name]) => make("th", { class: "n", text: name })))), make("tbody", {}, ...rows)));
  }

  function buildCurves() {
    for (const name of ["loss", "perplexity", "memory_rank"]) usedNames.add(name); // a rank is no curve, a perplexity no other one
    const evaluations = runs.flatMap((run, index) => (run.evaluations["eval/loss"] ? [{ run, name: "eval/loss", label: several ? `${run.name}, held out` : "held out", color: several ? runColor(index) : "c1" }] : []));
    let loss = null;
    if (has("loss") || evaluations.length) {
      const sources = sourcesOf("loss").map((source) => (several ? source : { ...source, label: "training" }));
      loss = curveCard({ id: "loss", title: "Loss", unit: "nats per token", format: "plain", width: "w8 tall", sources, evaluations, canLog: true, marks: ["nonfinite"] });
    }
    const side = [
      simpleCard("lr", "Learning rate", "", "plain", "lr", { zero: true, canLog: true, all: true, exact: true }),
      simpleCard("norm", "Gradient norm", "before clipping", "plain", "grad_norm", { canLog: true, marks: ["skipped", "nonfinite"] }),
    ].filter(Boolean);
    const terms = namesWith("loss/").map((name) => simpleCard(name, capital(name.slice(5)), "term of the loss", "plain", name, { canLog: true }));
    const other = [...new Set(runs.flatMap((run) => Object.keys(run.evaluations)))].filter((name) => name !== "eval/loss").map((name) => {
      const list = runs.flatMap((run, index) => (run.evaluations[name] ? [{ run, name, label: several ? run.name : name.slice(5), color: runColor(index) }] : []));
      return curveCard({ id: name, title: capital(name.slice(5)), unit: "held out", format: "plain", sources: [], evaluations: list, now: several ? null : plain(runs[0].evaluations[name].v.findLast(isNumber)) });
    });
    if (loss && side.length < 2) { loss.node.classList.remove("tall"); loss.node.classList.add(side.length ? "w8" : "w12"); loss.node.querySelector(".plot").style.height = "300px"; }
    const further = [...terms, ...other].filter(Boolean);
    if (further.length === 1) { further[0].node.querySelector(".plot").classList.add("low"); further[0].spec.low = true; }
    addSection("learning", "Learning", [loss, ...side, ...further]);
    if (loss) addLane(loss);
  }

  const PHASES = { data: "c5", forward: "c6", backward: "c0", reduce: "c1", step: "c2", evaluate: "c4", save: "c3", log: "c7", garbage: "ink-3" };
  function buildSpeed() {
    for (const name of ["seconds", "documents_per_second", "memory_reserved"]) usedNames.add(name);
    const phases = namesWith("seconds/");
    phases.forEach((name) => usedNames.add(name));
    const colorOf = (name) => PHASES[name.slice(8)] || "ink-3";
    const stacked = phases.length && runs.length > 2 ? [barCard("phases", "Step time by phase", "mean", phases, colorOf, (name) => name.slice(8), seconds)] : phases.length ? runs.filter((run) => phases.some((name) => run.series[name])).map((run) => {
      const order = Object.keys(PHASES).map((name) => `seconds/${name}`);
      const names = phases.filter((name) => run.series[name]).sort((a, b) => (order.indexOf(a) + 1 || 99) - (order.indexOf(b) + 1 || 99));
      const mean = (values) => values.reduce((sum, x) => sum + (x || 0), 0) / values.length;
      const means = Object.fromEntries(names.map((name) => [name, mean(run.series[name].m || run.series[name].v)]));
      const total = Object.values(means).reduce((a, b) => a + b, 0);
      const totals = Object.fromEntries(names.map((name) => [name, total ? `${((100 * means[name]) / total).toFixed(means[name] / total < 0.1 ? 1 : 0)} %` : ""]));
      return curveCard({ id: `phases-${runs.indexOf(run)}`, title: "Step time by phase", unit: several ? run.name : "", format: "seconds", stack: true, zero: true, all: false, totals, width: several ? "w6" : "w8",
        sources: names.map((name) => ({ run, name, label: name.slice(8), color: colorOf(name) })) });
    }) : [];
    const plainTime = simpleCard("seconds", "Step time", "", "seconds", "seconds", { zero: true });
    const time = phases.length ? [...stacked, ...(several || plainTime ? [plainTime] : [])] : [plainTime];
    addSection("speed", "Speed and memory", [
      ...(phases.length && !several ? stacked : time),
      simpleCard("rate", "Throughput", "tokens a second", "short", "tokens_per_second", { zero: true }),
      pairCard("mfu", "Utilization", "of peak FLOP/s", "percent", [["mfu", "MFU"], ["hfu", "HFU"]], { zero: true, main: "mfu" }),
      pairCard("memory", "Memory", "worst rank", "bytes", [["memory", "allocated"], ["memory_reserved", "reserved"], ["memory_peak", "peak"]], { zero: true, all: true, exact: true, main: "memory_peak" }),
      ...(phases.length && several ? [] : phases.length ? [plainTime] : []),
    ]);
  }

  function buildData() {
    const groups = namesWith("tokens/");
    for (const name of [...groups, ...namesWith("rows/"), "tokens", "tokens_processed", "documents", "trained_tokens_per_second"]) usedNames.add(name);
    const corpora = groups.length && runs.length > 2 ? [barCard("corpora", "Tokens by corpus", "share", groups, (name) => runColor(groups.indexOf(name)), (name) => name.slice(7), null)] : groups.length ? runs.filter((run) => groups.some((name) => run.series[name])).map((run) => {
      const names = groups.filter((name) => run.series[name]);
      const sums = Object.fromEntries(names.map((name) => [name, (run.series[name].m || run.series[name].v).reduce((sum, x) => sum + (x || 0), 0)]));
      const total = Object.values(sums).reduce((a, b) => a + b, 0);
      return curveCard({ id: `corpora-${runs.indexOf(run)}`, title: "Tokens by corpus", unit: several ? run.name : "share of a step", format: "percent", stack: true, share: true, zero: true, all: true, width: several ? "w6" : "",
        totals: Object.fromEntries(names.map((name) => [name, percent(sums[name] / total)])), sources: names.map((name, at) => ({ run, name, label: name.slice(7), color: runColor(at) })) });
    }) : [];
    const packed = runs.filter((run) => run.packing.length);
    const tables = isSame(packed, (run) => run.packing) ? packed.slice(0, 1).map((run) => packingCard(run, "")) : packed.map((run) => packingCard(run, run.name));
    addSection("data", "Data", [
      ...corpora,
      runs.some((run) => spread(run.series.tokens) > 0.03) ? pairCard("tokens", "Tokens a step", "", "short", [["tokens", "with a loss"], ["tokens_processed", "processed"]], { zero: true, all: true, main: "tokens" }) : null,
      simpleCard("padding", "Padding", "share of a row", "percent", "padding", { zero: true }),
      simpleCard("documents", "Documents", "a second", "short", "documents_per_second", { zero: true }),
      ...tables,
    ]);
  }
  /** One bar for each run, of the means of its parts; as shares of a whole where there is no format. */
  function barCard(id, title, unit, names, colorOf, labelOf, format) {
    const mean = (run, name) => {
      const values = run.series[name]?.m || run.series[name]?.v || [];
      return values.reduce((sum, x) => sum + (x || 0), 0) / (values.length || 1);
    };
    const sums = runs.map((run) => names.reduce((sum, name) => sum + mean(run, name), 0));
    const legend = make("div", { class: "legend" }, ...names.map((name) => make("span", {}, make("i", { class: "swatch", style: { background: `color-mix(in srgb, var(--${colorOf(name)}) 72%, var(--card))` } }), make("bdi", { text: labelOf(name) }))));
    const rows = runs.flatMap((run, index) => {
      if (!sums[index]) return [];
      const whole = format ? Math.max(...sums) : sums[index];
      const parts = names.map((name) => {
        const part = mean(run, name);
        return make("i", { title: `${labelOf(name)} ${format ? `${format(part)}, ` : ""}${percent(part / sums[index])}`, style: { width: `${(100 * part) / whole}%`, background: `color-mix(in srgb, var(--${colorOf(name)}) 72%, var(--card))` } });
      });
      return [make("span", { class: "name" }, swatch(index), make("bdi", { text: run.name })), make("span", { class: "bar-parts" }, ...parts), make("span", { class: "n", text: format ? format(sums[index]) : "" })];
    });
    return { node: make("article", { class: "card w6", "data-card": id }, makeHeader({ title, unit }, [legend], null), make("div", { class: "bars" }, ...rows)) };
  }
  function packingCard(run, name) {
    const columns = [["corpus", "corpus"], ["tokens", "tokens", short], ["rows", "rows", short], ["documents", "documents", short], ["efficiency", "full", percent]].filter(([key]) => run.packing.some((row) => row[key] !== undefined && row[key] !== null));
    return make("article", { class: "card" }, make("header", {}, make("h3", { text: "Packing" }), make("span", { class: "unit", text: name })),
      make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...columns.map(([, label, show]) => make("th", { class: show ? "n" : "", text: label })))),
        make("tbody", {}, ...run.packing.map((row) => make("tr", {}, ...columns.map(([key, , show]) => make("td", { class: show ? "n" : "wrap", text: show ? show(row[key]) : row[key] ?? "" }))))))));
  }

  const STATS = { rms: "rms", largest: "largest", zeros: "zeros", nonfinite: "not finite" };
  function buildInside() {
    const cards = [];
    runs.forEach((run) => {
      const kinds = run.layers.filter((layer) => Object.keys(layer.stats).length && layer.x.length);
      if (kinds.length) cards.push(layerCard(run, kinds));
      if (run.experts) cards.push(...expertCards(run));
    });
    const balance = [
      simpleCard("load_over_mean", "Busiest expert", "load over the mean, worst layer", "short", "load_over_mean"),
      simpleCard("load_entropy", "Entropy of loads", "1 is balanced, worst layer", "plain", "load_entropy"),
      simpleCard("expert_bias", "Bias of experts", "largest of a layer", "plain", "expert_bias"),
      simpleCard("dropped_share", "Dropped choices", "worst layer", "percent", "dropped_share", { zero: true }),
    ];
    if (cards.length === 1) { cards[0].node.classList.remove("w6"); cards[0].node.classList.add("w12"); }
    addSection("inside", "Inside the model", [...cards, ...balance]);
  }
  /** Names without the end that all weights share. */
  const shorten = (names) => names.map((name) => (name.endsWith(".weight") ? name.slice(0, -7) : name));
  function layerCard(run, kinds) {
    let [kind, stat] = (choice.layer || "").split(".");
    if (!kinds.some((layer) => layer.kind === kind)) kind = (kinds.find((layer) => layer.kind === "gradient") || kinds[0]).kind;
    const get = () => kinds.find((layer) => layer.kind === kind);
    if (!get().stats[stat]) stat = Object.keys(get().stats)[0];
    const kindGroup = make("span", { class: "segment small", role: "group", "aria-label": "What" });
    const statGroup = make("span", { class: "segment small", role: "group", "aria-label": "Statistic" });
    const card = heatCard({
      id: "layers", title: "By layer", unit: several ? run.name : "", width: "w6", height: 420, controls: [kindGroup, statGroup],
      get: () => ({ x: get().x.map((x) => x[AXIS_INDEX[choice.axis]]), end: domain()[1], rows: shorten(get().names), values: get().stats[stat], kind: ["zeros", "nonfinite"].includes(stat) ? "linear" : "log", format: stat === "zeros" ? "percent" : "short" }),
    });
    const fill = () => {
      kindGroup.replaceChildren(...kinds.map((layer) => make("button", { type: "button", text: layer.kind, "aria-pressed": String(layer.kind === kind), on: { click: () => pick(layer.kind, stat) } })));
      statGroup.replaceChildren(...Object.keys(get().stats).map((name) => make("button", { type: "button", text: STATS[name], "aria-pressed": String(name === stat), on: { click: () => pick(kind, name) } })));
    };
    const pick = (newKind, newStat) => {
      kind = newKind;
      stat = get().stats[newStat] ? newStat : Object.keys(get().stats)[0];
      choice.layer = `${kind}.${stat}`;
      keepChoice();
      fill();
      card.redraw();
    };
    fill();
    return card;
  }
  function expertCards(run) {
    const { load, first, last } = run.experts;
    const layers = load[0].length;
    const shown = layers <= 4 ? [...Array(layers).keys()] : [0, 1, 2, 3].map((i) => Math.round((i * (layers - 1)) / 3));
    const rows = shown.flatMap((layer) => load[0][layer].map((_, expert) => `layer ${layer}, expert ${expert}`));
    const groups = shown.map((layer, at) => ({ label: `layer ${layer}`, first: at * load[0][0].length, count: load[0][0].length }));
    const width = (last - first + 1) / load.length;
    const position = (step) => {
      const i = run.x.step.findIndex((x) => x >= step);
      return (run.x[choice.axis] || run.x.step)[i < 0 ? run.x.step.length - 1 : i];
    };
    return [heatCard({
      id: "experts", title: "Expert load", unit: `${several ? `${run.name}, ` : ""}over the mean of the layer${shown.length < layers ? `; ${shown.length} of ${layers} layers` : ""}`, width: "w6", height: 420,
      get: () => ({ x: load.map((_, i) => position(first + i * width)), end: domain()[1], rows, groups, values: load.map((column) => shown.flatMap((layer) => column[layer])), kind: "diverging", format: "short" }),
    })];
  }

  function buildRest() {
    const isOfLayer = /^(load_over_mean|load_entropy|expert_bias|dropped_share)\/\d+$/; // the heat map shows them
    const rest = [...new Set(runs.flatMap((run) => Object.keys(run.series)))].filter((name) => !usedNames.has(name) && !isOfLayer.test(name));
    addSection("other", "Other metrics", rest.map((name) => simpleCard(name, capital(name.replaceAll("_", " ")), "", "plain", name, { canLog: true })));
  }

  function buildTables() {
    addSection("samples", "Samples", [sampleCard()]);
    addSection("events", "Events", [eventTable()]);
    const layouts = runs.filter((run) => run.layout);
    const isOne = layouts.length === runs.length && isSame(layouts, (run) => run.layout);
    addSection("layout", "Layout", (isOne ? layouts.slice(0, 1) : layouts).map((run) => layoutCard(run, several && !isOne)));
    addSection("configuration", "Configuration", [configCard()]);
    const notes = runs.filter((run) => run.notes.length);
    addSection("notes", "What this page leaves out", notes.map((run) => make("article", { class: "card w12" }, several ? make("header", {}, make("h3", { text: run.name })) : null, make("ul", { class: "notes" }, ...run.notes.map((note) => make("li", { text: note }))))));
  }
  function sampleCard() {
    const all = runs.flatMap((run) => run.samples.map((sample) => ({ ...sample, run }))).sort((a, b) => (b.step ?? 0) - (a.step ?? 0));
    if (!all.length) return null;
    const figure = (sample) => make("figure", { class: "sample" }, make("figcaption", {}, make("div", { text: isNumber(sample.step) ? `step ${whole(sample.step)}` : "" }), several ? make("bdi", { text: sample.run.name }) : null),
      make("pre", {}, sample.prompt ? make("span", { class: "prompt", text: sample.prompt }) : null, document.createTextNode(sample.text)));
    return make("article", { class: "card w12" }, ...all.slice(0, 3).map(figure), all.length > 3 ? make("details", {}, make("summary", { text: `${all.length - 3} more` }), ...all.slice(3).map(figure)) : null);
  }
  function layoutCard(run, isNamed) {
    const { title, rows, ranks } = run.layout;
    const mesh = make("div", { class: "mesh", style: { "grid-template-columns": `max-content repeat(${ranks}, minmax(17px, 1fr))` } });
    rows.forEach((row) => {
      if (row.name === "rank") mesh.append(make("span", { class: "gap" }));
      const isAxis = !["rank", "tokens", "parameters", "experts"].includes(row.name);
      mesh.append(make("span", { class: "name", text: row.name }), ...row.cells.map(([text, width, shade]) => {
        const tone = isAxis ? `color-mix(in srgb, var(--accent) ${shade ? 26 : 13}%, var(--card))` : row.name === "rank" ? "var(--grid)" : `color-mix(in srgb, var(--c${shade % 8}) 22%, var(--card))`;
        return make("span", { class: "cell", text, style: { "grid-column": `span ${width}`, background: tone } });
      }));
    });
    return make("article", { class: "card w12" }, make("header", {}, make("h3", { text: `${ranks} ranks` }), make("span", { class: "unit", text: `${isNamed ? `${run.name}: ` : ""}${title}` })), rows.length ? mesh : null,
      rows.length ? make("p", { class: "note", text: "A column is a rank; an axis divides those above it. Ranks with the same number of tokens read the same rows, with the same parameters hold the same shards." }) : null);
  }
  function configCard() {
    const names = [...new Set(runs.flatMap((run) => run.config.map(([key]) => key)))];
    const software = [...new Set(runs.flatMap((run) => run.software.map(([key]) => key)))];
    if (!names.length && !software.length) return null;
    const pairs = (kind, list) => list.map((key) => [key, runs.map((run) => run[kind].find(([name]) => name === key)?.[1] ?? "–")]);
    const all = [...pairs("config", names), ...pairs("software", software)];
    const find = make("input", { class: "find", type: "search", placeholder: "Find a setting", "aria-label": "Find a setting" });
    const body = make("div", {});
    const fill = () => {
      const shown = all.filter(([key, values]) => `${key} ${values.join(" ")}`.toLowerCase().includes(find.value.toLowerCase()));
      body.replaceChildren(pairList(shown.filter(([, values]) => new Set(values).size === 1)));
    };
    find.addEventListener("input", fill);
    fill();
    const title = several ? "The same in all runs" : "Configuration and software";
    return make("article", { class: "card w12" }, make("header", {}, make("h3", { text: title }), make("div", { class: "right" }, find)), body);
  }
  const pairList = (pairs) => make("dl", { class: "pairs" }, ...pairs.map(([key, [value]]) => make("div", {}, make("dt", { text: key }), make("dd", { text: value }))));
  const swatch = (index) => make("i", { class: "swatch", style: { background: `var(--${runColor(index)})` } });
  /** Each setting with its values, and the runs that have each. */
  const differenceList = (pairs) => make("dl", { class: "pairs near" }, ...pairs.map(([key, values]) => make("div", {}, make("dt", { text: key }),
    make("dd", {}, ...[...new Set(values)].map((value) => make("span", { class: "value" }, ...values.flatMap((other, index) => (other === value ? [swatch(index)] : [])), make("bdi", { text: value })))))));
  function buildDifferences() {
    if (!several) return;
    const rows = ["config", "software"].flatMap((kind) => [...new Set(runs.flatMap((run) => run[kind].map(([key]) => key)))].map((key) => [key, runs.map((run) => run[kind].find(([name]) => name === key)?.[1] ?? "–")]));
    const differing = rows.filter(([key, values]) => new Set(values).size > 1 && key !== "out");
    const card = make("article", { class: "card w12" }, differing.length ? differenceList(differing) : make("p", { class: "note", text: "Nothing in configuration and software." }));
    addSection("differences", "What differs", [card]);
  }

  function buildFoot() {
    const thinned = Math.max(1, ...runs.map((run) => run.every));
    const parts = [`Written ${clock(page.written)}`, "Drag over a chart to zoom, double-click to see all"];
    if (thinned > 1) parts.push(`Each point of a curve stands for up to ${whole(thinned)} steps: faint lines reach from the smallest value to the largest`);
    if (page.refresh) parts.push(isStale ? "Nobody writes this page any more: it does not follow the run" : "This page follows the run");
    document.getElementById("foot").append(...parts.map((text) => make("span", { text })));
  }
  /** Load the page again while a run goes on, unless the reader is in the middle of something. */
  function follow() {
    if (!page.refresh || isStale) return;
    let isHeld = false;
    addEventListener("pointerdown", () => { isHeld = true; });
    addEventListener("pointerup", () => { isHeld = false; });
    setInterval(() => {
      const isBusy = isHeld || !tip.hidden || String(getSelection()) || document.querySelector(".find")?.value;
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
  if (!runs.some((run) => run.x.step.length || Object.keys(run.evaluations).length)) document.getElementById("page").append(make("article", { class: "card w12 empty", text: "No step has been logged yet." }));
  buildDifferences();
  buildCurves();
  buildSpeed();
  buildData();
  buildInside();
  buildRest();
  buildTables();
  buildFoot();
  redrawAll();
  addEventListener("beforeprint", () => { root.dataset.theme = "light"; colors = {}; redrawAll(); });
  addEventListener("afterprint", () => { applyTheme(); redrawAll(); });
  follow();
  root.dataset.ready = String(drawn.length);
})();
