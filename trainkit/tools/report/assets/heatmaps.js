/* Heat maps over the common axis. */

function mix(from, to, share) {
  const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const [a, b] = [parts(from), parts(to)];
  return `rgb(${a.map((x, i) => Math.round(x + (b[i] - x) * share)).join(",")})`;
}
const ramp = (share) =>
  share < 0.5
    ? mix(color("low"), color("mid"), 2 * share)
    : mix(color("mid"), color("high"), 2 * share - 1);
const diverge = (share) =>
  share < 0.5
    ? mix(color("cold"), color("zero"), 2 * share)
    : mix(color("zero"), color("hot"), 2 * share - 1);

/** A card with a matrix over the common axis: `get()` returns {x, rows, values, kind, format}, where
 * a column of values was measured at its x, and reaches back to the one before it. */
function heatCard(spec) {
  const canvas = make("canvas", { role: "img", "aria-label": spec.title });
  const bar = make("span", { class: "ramp" });
  const node = make(
    "article",
    { class: `card ${spec.width}`, "data-card": spec.id },
    makeHeader(spec, spec.controls || [], make("div", { class: "right" }, bar)),
    make("div", { class: "heat" }, canvas),
  );
  const item = { node, rescale: () => item.redraw() };
  let placed = null;
  item.redraw = () => {
    const { x, rows, values, kind, format, groups } = spec.get();
    const width = Math.floor(canvas.parentNode.clientWidth);
    if (!width) return;
    const isNarrow = width < 500;
    const labels = isNarrow ? rows.map((name) => name.replace(/^layers\./, "")) : rows;
    const gutter = Math.min(
      isNarrow ? 110 : 190,
      14 + 6.2 * Math.max(...(groups || labels).map((name) => (name.label || name).length)),
    );
    const lowest = rows.length <= 48 ? 13 : 3; // where names are few each of them is readable
    const size = Math.max(lowest, Math.min(36, spec.height / rows.length));
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
    const edges = [x.length > 1 ? Math.max(domain()[0], 2 * x[0] - x[1]) : domain()[0], ...x];
    const shown = values
      .flatMap((column, i) => (edges[i + 1] > low && edges[i] < high ? column : []))
      .filter((v) => v !== null);
    const scale = makeScale(shown, kind);
    context.save();
    context.beginPath();
    context.rect(gutter, 0, inner, size * rows.length);
    context.clip();
    context.fillStyle = color("grid");
    context.fillRect(gutter, 0, inner, size * rows.length);
    values.forEach((column, i) => {
      const left = Math.floor(place(edges[i])),
        right = Math.ceil(place(edges[i + 1]));
      if (right < gutter || left > gutter + inner) return;
      column.forEach((value, row) => {
        if (value === null) return;
        context.fillStyle = scale.paint(value);
        context.fillRect(
          left,
          Math.floor(row * size),
          Math.max(1, right - left),
          Math.ceil((row + 1) * size) - Math.floor(row * size),
        );
      });
    });
    context.restore();
    context.fillStyle = color("ink-3");
    context.font = `11px ${color("sans")}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = Math.ceil(13 / size);
    const most = Math.floor((gutter - 10) / 6);
    if (!groups)
      labels.forEach((name, row) => {
        if (row % every === 0)
          context.fillText(
            name.length > most ? `…${name.slice(1 - most)}` : name,
            gutter - 8,
            Math.max(6, (row + 0.5) * size),
          );
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
    if (shown.every((v) => v === 0)) bar.replaceChildren(make("span", { text: "0 everywhere" }));
    else
      bar.replaceChildren(
        make("span", { text: FORMATS[format](scale.low) }),
        make("i", { style: { background: `linear-gradient(90deg, ${steps.join(",")})` } }),
        make("span", { text: FORMATS[format](scale.high) }),
      );
    placed = { edges, gutter, inner, width, size, rows, values, format, low, high };
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const row = Math.floor(py / placed.size);
    const at = placed.low + ((px - placed.gutter) / placed.inner) * (placed.high - placed.low);
    const column = placed.edges.findIndex((edge) => edge >= at) - 1;
    if (px < placed.gutter || row < 0 || row >= placed.rows.length || column < 0) {
      tip.hidden = true;
      return;
    }
    const value = placed.values[column][row];
    tip.replaceChildren(
      make("h4", { text: placed.rows[row] }),
      tipLine(
        null,
        `${choice.axis} ${AXES[choice.axis][2](placed.edges[column + 1])}`,
        value === null ? "–" : FORMATS[placed.format](value),
      ),
    );
    placeTip(event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });
  canvas.addEventListener("dblclick", () => setZoom(null));
  new ResizeObserver(() => {
    if (placed && Math.floor(canvas.parentNode.clientWidth) !== placed.width) item.redraw();
  }).observe(node);
  drawn.push(item);
  return item;
}
function makeScale(values, kind) {
  const known = [...values].sort((a, b) => a - b);
  if (kind === "diverging")
    return {
      low: 0,
      high: 2,
      tone: diverge,
      paint: (v) => diverge(Math.min(1, Math.max(0, v / 2))),
    };
  const positive = known.filter((v) => v > 0);
  if (kind === "log" && positive.length) {
    const low = positive[Math.floor(positive.length * 0.01)],
      high = Math.max(positive.at(-1), low * 1.01);
    return {
      low,
      high,
      tone: ramp,
      paint: (v) =>
        ramp(v <= 0 ? 0 : Math.min(1, Math.max(0, Math.log(v / low) / Math.log(high / low)))),
    };
  }
  const low = Math.min(0, known[0] ?? 0),
    high = known.at(-1) > low ? known.at(-1) : low + 1;
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
