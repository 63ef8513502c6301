/* Events: the lane below the loss, and the table. */

// kind: [row of the lane, colour, shape, whether it is drawn small]
const KINDS = {
  start: ["run", "ink-2", "play"],
  restart: ["run", "accent", "play"],
  ranks: ["run", "c4", "play"],
  stop: ["run", "ink-2", "square"],
  end: ["run", "ink-2", "square"],
  failure: ["run", "bad", "square"],
  save: ["saves", "good", "dot"],
  "save failed": ["saves", "bad", "cross"],
  evaluation: ["evals", "c1", "diamond"],
  sample: ["samples", "c3", "ring"],
  skip: ["steps", "warn", "cross"],
  spike: ["steps", "warn", "up"],
  rollback: ["steps", "bad", "back"],
  rewind: ["steps", "ink-3", "back"],
  divergence: ["steps", "bad", "up"],
  nonfinite: ["steps", "bad", "cross"],
  control: ["notes", "c4", "ring"],
  profile: ["notes", "c4", "diamond"],
  straggler: ["notes", "warn", "dot"],
  health: ["notes", "warn", "up"],
  warning: ["notes", "warn", "up"],
};
const MOMENTS = ["restart", "ranks", "rollback", "failure", "divergence"];
const SHAPES = {
  play: "M-3.5-4.5 L4.5 0 L-3.5 4.5Z",
  back: "M3.5-4.5 L-4.5 0 L3.5 4.5Z",
  square: "M-3.5-3.5H3.5V3.5H-3.5Z",
  dot: "M-2.6 0a2.6 2.6 0 1 0 5.2 0a2.6 2.6 0 1 0-5.2 0Z",
  ring: "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0Z",
  diamond: "M0-4.2L4.2 0L0 4.2L-4.2 0Z",
  up: "M0-4.2L4.4 3.6H-4.4Z",
  cross: "M-3.2-3.2L3.2 3.2M3.2-3.2L-3.2 3.2",
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
  const svg = draw("svg", {
    width: 12,
    height: 12,
    viewBox: "-6 -6 12 12",
    "aria-hidden": "true",
  });
  svg.append(glyph(kind));
  return svg;
}
function eventsOf(run) {
  const marks = run.marks
    .filter((mark) => mark.kind === "nonfinite")
    .map((mark) => ({
      t: mark.t,
      x: mark.x,
      kind: "nonfinite",
      text: Object.entries(mark.values)
        .map(([name, value]) => `${name} is ${value}`)
        .join(", "),
    }));
  return [...run.events, ...marks];
}

/** The events of the runs under a chart, on its axis. */
function addLane(item) {
  const rows = several
    ? runs.map((run) => run.name)
    : LANES.filter((lane) =>
        eventsOf(runs[0]).some((event) => !QUIET.includes(event.kind) && kindOf(event)[0] === lane),
      );
  const hidden = several ? [...QUIET, "save", "evaluation", "sample"] : QUIET; // a row holds all of a run
  const all = runs.flatMap((run, index) =>
    eventsOf(run)
      .filter((event) => !hidden.includes(event.kind))
      .map((event) => ({ event, index })),
  );
  if (!all.length) return;
  const height = 19;
  const svg = draw("svg", {
    height: rows.length * height,
    role: "img",
    "aria-label": `${all.length} events; the table below lists them`,
  });
  const present = Object.keys(KINDS).filter((kind) => all.some(({ event }) => event.kind === kind));
  const keys = make(
    "div",
    { class: "keys" },
    ...present.map((kind) =>
      make(
        "span",
        {},
        glyphIcon(kind),
        document.createTextNode(kind === "nonfinite" ? "not finite" : kind),
      ),
    ),
  );
  item.node.append(make("div", { class: "lane" }, svg), keys);
  const lane = { rescale: () => lane.redraw() };
  lane.redraw = () => {
    svg.replaceChildren();
    const plot = item.plot;
    const left = GUTTER,
      width = plot.width - GUTTER - RIGHT; // uPlot places its parts later
    rows.forEach((name, row) => {
      const y = (row + 0.5) * height;
      svg.append(draw("line", { class: "row", x1: left, x2: left + width + 6, y1: y, y2: y }));
      const label = draw("text", {
        x: left - 11,
        y: y + 3.5,
        "text-anchor": "end",
        text: name.length > 9 ? `${name.slice(0, 8)}…` : name,
      });
      svg.append(label);
    });
    const [low, high] = view();
    for (const { event, index } of all) {
      const at = event.x[AXIS_INDEX[choice.axis]];
      if (!isNumber(at) || at < low || at > high || !isShown(index)) continue;
      const row = several ? index : rows.indexOf(kindOf(event)[0]);
      const mark = glyph(event.kind);
      mark.setAttribute("class", "mark");
      mark.setAttribute(
        "transform",
        `translate(${(left + ((at - low) / (high - low)) * width).toFixed(1)} ${(row + 0.5) * height})`,
      );
      mark.addEventListener("pointerenter", (pointer) => {
        tip.replaceChildren(
          make("h4", { text: event.kind }, make("span", { text: `step ${whole(event.x[0])}` })),
          event.text ? make("p", { text: event.text.slice(0, 400) }) : null,
          make("p", {
            text: [several ? runs[index].name : "", event.t ? clock(event.t) : ""]
              .filter(Boolean)
              .join(" · "),
          }),
        );
        placeTip(pointer.clientX, pointer.clientY);
      });
      mark.addEventListener("pointerleave", () => {
        tip.hidden = true;
      });
      svg.append(mark);
    }
  };
  item.resized = lane.redraw;
  drawn.push(lane);
}

function eventTable() {
  const all = runs
    .flatMap((run, index) => eventsOf(run).map((event) => ({ event, index })))
    .sort((a, b) => (b.event.t ?? 0) - (a.event.t ?? 0) || b.event.x[0] - a.event.x[0]);
  if (!all.length) return null;
  const order = Object.keys(KINDS);
  const kinds = [...new Set(all.map(({ event }) => event.kind))].sort(
    (a, b) => (order.indexOf(a) + 1 || 99) - (order.indexOf(b) + 1 || 99),
  );
  const rare = kinds.filter((kind) => !["save", "evaluation", "sample"].includes(kind));
  let shown = new Set(all.length > 40 && rare.length ? rare : kinds);
  const body = make("tbody");
  const fill = () => {
    body.replaceChildren(
      ...all
        .filter(({ event }) => shown.has(event.kind))
        .slice(0, 400)
        .map(({ event, index }) =>
          make(
            "tr",
            {},
            make("td", { class: "n", text: whole(event.x[0]) }),
            make("td", { class: "s", text: event.t ? clock(event.t) : "" }),
            several
              ? make(
                  "td",
                  { class: "s" },
                  make(
                    "span",
                    { class: "kind" },
                    make("i", {
                      class: "swatch",
                      style: { background: `var(--${runColor(index)})` },
                    }),
                    make("bdi", { text: runs[index].name }),
                  ),
                )
              : null,
            make(
              "td",
              { class: "s" },
              make(
                "span",
                { class: "kind" },
                glyphIcon(event.kind),
                make("bdi", { text: event.kind === "nonfinite" ? "not finite" : event.kind }),
              ),
            ),
            make("td", { class: "wrap", text: event.text }),
          ),
        ),
    );
  };
  const chips = make(
    "div",
    { class: "chips" },
    ...kinds.map((kind) =>
      make("button", {
        type: "button",
        "aria-pressed": String(shown.has(kind)),
        text: `${kind === "nonfinite" ? "not finite" : kind} ${all.filter(({ event }) => event.kind === kind).length}`,
        on: {
          click: (click) => {
            if (shown.has(kind)) shown.delete(kind);
            else shown.add(kind);
            click.currentTarget.setAttribute("aria-pressed", String(shown.has(kind)));
            fill();
          },
        },
      }),
    ),
  );
  fill();
  return make(
    "article",
    { class: "card w12" },
    chips,
    make(
      "div",
      { class: "limit scroll", tabindex: "0" },
      make(
        "table",
        { class: "events" },
        make(
          "thead",
          {},
          make(
            "tr",
            {},
            make("th", { class: "n", text: "step" }),
            make("th", { text: "time" }),
            several ? make("th", { text: "run" }) : null,
            make("th", { text: "event" }),
            make("th", { text: "" }),
          ),
        ),
        body,
      ),
    ),
  );
}
