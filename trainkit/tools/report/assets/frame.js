/* The frame of the page: sections, the bar of controls, the head. */

const has = (name) => runs.some((run) => run.series[name]);
const isSame = (list, get) => new Set(list.map((run) => JSON.stringify(get(run)))).size <= 1;
const namesWith = (prefix) => [
  ...new Set(
    runs.flatMap((run) => Object.keys(run.series).filter((name) => name.startsWith(prefix))),
  ),
];
const lastOf = (run, name) => run.series[name]?.v.findLast(isNumber);
/** How far values reach around their middle: nobody looks at a curve that does not move. */
const spread = (series) => {
  const values = (series?.v || []).filter(isNumber).sort((a, b) => a - b);
  return values.length
    ? (values.at(-1) - values[0]) / (Math.abs(values[values.length >> 1]) || 1)
    : 0;
};
const sourcesOf = (name) =>
  runs
    .map((run, index) => ({
      run,
      name,
      label: several ? run.name : name,
      color: runColor(index),
      dash: index > 7 ? [6, 3] : undefined,
    }))
    .filter(({ run }) => run.series[name]); // eight colours
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
  const sources = known.flatMap(([name, label], at) =>
    sourcesOf(name).map((source) => ({
      ...source,
      label: several ? source.label : label,
      color: several ? source.color : runColor(at),
    })),
  );
  if (known.length === 1 && !several)
    options = { ...options, now: FORMATS[format](lastOf(runs[0], known[0][0])) };
  return curveCard({ id, title, unit, format, sources, ...options });
}

function addSection(id, title, items) {
  const nodes = items.filter(Boolean).map((item) => item.node || item);
  if (!nodes.length) return;
  const grid = make("div", { class: "grid" }, ...arrange(nodes));
  document
    .getElementById("page")
    .append(make("section", { id }, make("h2", { text: title }), grid));
  nav.append(
    make("a", {
      href: "#",
      text: title,
      on: {
        click: (event) => {
          event.preventDefault();
          document.getElementById(id).scrollIntoView();
        },
      },
    }),
  );
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
  const whole = rest.filter((node) => node.classList.contains("w12"));
  for (const node of rest) {
    if (!/\bw\d/.test(node.className) || ordered.includes(node) || whole.includes(node)) continue;
    ordered.push(node);
    const isAlone = node === halves.at(-1) && halves.length % 2 === 1;
    if (node.classList.contains("w8"))
      loose.length ? row(1, 4) : node.classList.replace("w8", "w12");
    else if (isAlone)
      loose.length ? row(loose.length % 3 === 2 ? 2 : 1, 6) : node.classList.replace("w6", "w12");
  }
  if (loose.length % 3 === 1 && loose.length > 1) row(4, 12);
  else if (loose.length % 3) row(loose.length % 3, 12);
  while (loose.length) row(3, 12);
  return [...ordered, ...whole];
}

const nav = make("nav", { class: "nav", "aria-label": "Sections" });
const resetButton = make("button", {
  class: "plain",
  type: "button",
  text: "Show all",
  title: "Undo the zoom (double-click)",
  hidden: "",
  on: { click: () => setZoom(null) },
});
function buildBar() {
  const buttons = Object.entries(AXES).map(([name, [label]]) => {
    const button = make("button", {
      type: "button",
      text: label,
      "aria-pressed": String(choice.axis === name),
      on: {
        click: () => {
          if (choice.axis === name) return;
          choice.zoom = convertZoom(choice.zoom, choice.axis, name);
          choice.axis = name;
          for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
          keepChoice();
          redrawAll();
        },
      },
    });
    button.disabled = !usable.includes(name);
    return button;
  });
  const output = make("output", {});
  const slider = make("input", {
    type: "range",
    min: 0,
    max: WINDOWS.length - 1,
    step: 1,
    value: WINDOWS.indexOf(choice.window),
    "aria-label": "Smoothing, in steps",
    id: "smoothing",
  });
  const label = () => {
    output.textContent = choice.window ? `${short(choice.window)} steps` : "off";
  };
  slider.addEventListener("input", () => {
    choice.window = WINDOWS[slider.value];
    label();
    redrawAll();
  });
  slider.addEventListener("change", keepChoice);
  label();
  const theme = make("button", {
    class: "plain icon",
    type: "button",
    "aria-label": "Dark or light",
    title: "Dark or light",
    id: "theme",
    on: {
      click: () => {
        choice.theme = root.dataset.theme === "dark" ? "light" : "dark";
        applyTheme();
        keepChoice();
        redrawAll();
      },
    },
  });
  const moon = draw("svg", {
    width: 16,
    height: 16,
    viewBox: "0 0 16 16",
    "aria-hidden": "true",
  });
  moon.append(
    draw("circle", {
      cx: 8,
      cy: 8,
      r: 5.6,
      fill: "none",
      stroke: "currentColor",
      "stroke-width": 1.4,
    }),
    draw("path", { d: "M8 2.4a5.6 5.6 0 0 1 0 11.2Z", fill: "currentColor" }),
  );
  theme.append(moon);
  const logo = draw("svg", {
    width: 18,
    height: 18,
    viewBox: "0 0 18 18",
    "aria-hidden": "true",
  });
  const curve = draw("path", {
    d: "M2 2.5C3.5 11 7 14.6 16 15.4",
    fill: "none",
    "stroke-width": 2.2,
    "stroke-linecap": "round",
  });
  curve.style.stroke = "var(--accent)";
  logo.append(
    draw("path", {
      d: "M2 2.5V15.6H16",
      fill: "none",
      stroke: "currentColor",
      "stroke-width": 1.2,
      opacity: 0.35,
    }),
    curve,
  );
  document
    .getElementById("bar")
    .append(
      make(
        "div",
        {},
        make("span", { class: "brand" }, logo, document.createTextNode("trainkit")),
        nav,
        make(
          "div",
          { class: "controls" },
          resetButton,
          make("label", { class: "slide" }, document.createTextNode("Smoothing"), slider, output),
          make(
            "span",
            { class: "segment", role: "group", "aria-label": "Horizontal axis" },
            ...buttons,
          ),
          theme,
        ),
      ),
    );
}
/** The same lines of the first run, on another axis. */
function convertZoom(zoom, from, to) {
  const run = runs.find(
    (each, index) => isShown(index) && each.x.step.length && each.x[from] && each.x[to],
  );
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
    head.append(
      make("div", { class: "hero" }, make("h1", {}, make("bdi", { text: page.title }))),
      runTable(pill),
    );
    return;
  }
  const [run] = runs;
  const facts = [
    ...run.facts,
    ...(run.numbers.ranks ? [["ranks", String(run.numbers.ranks)]] : []),
    ...(run.start ? [["started", clock(run.start)]] : []),
  ];
  head.append(
    make(
      "div",
      { class: "hero" },
      make("h1", {}, make("bdi", { text: page.title })),
      pill(run),
      make(
        "dl",
        { class: "facts" },
        ...facts.map(([label, value]) =>
          make("div", {}, make("dt", { text: label }), make("dd", { text: value })),
        ),
      ),
    ),
  );
  const tiles = listTiles(run);
  if (tiles.length > 1)
    head.append(make("div", { class: "tiles", style: { "--tiles": tiles.length } }, ...tiles));
}
function listTiles(run) {
  const n = run.numbers;
  const tiles = [];
  const add = (label, value, unit, sub, tone, more) =>
    tiles.push(
      make(
        "div",
        { class: "tile" },
        make("div", { class: "label", text: label }),
        make(
          "div",
          { class: `value ${tone || ""}` },
          document.createTextNode(value),
          unit ? make("small", { text: unit }) : null,
        ),
        make("div", { class: "sub", text: sub || "\u00a0", title: more || sub || "" }),
      ),
    );
  const split = (text) => [text.split(" ")[0], text.split(" ").slice(1).join(" ")];
  add(
    "Step",
    whole(n.step),
    "",
    n.last ? `of ${whole(n.last)} · ${Math.floor((100 * n.step) / n.last)} %` : "",
  );
  if (n.last)
    tiles[0].append(
      make(
        "div",
        { class: "progress" },
        make("i", { style: { width: `${Math.min(100, (100 * n.step) / n.last)}%` } }),
      ),
    );
  const losses = run.series.loss?.v || [];
  if (losses.length) {
    const bad = losses.at(-1) === null;
    add(
      "Training loss",
      bad ? "not finite" : (n.loss ?? NaN).toFixed(4),
      "",
      n.loss === null ? "" : `perplexity ${short(Math.exp(Math.min(20, n.loss)))}`,
      bad ? "bad" : "",
    );
  }
  if (n.evaluation !== null) {
    const found = run.evaluations["eval/loss"];
    const best = found.v.reduce(
      (low, v, i) => (v !== null && (low < 0 || v < found.v[low]) ? i : low),
      -1,
    );
    add(
      "Held-out loss",
      n.evaluation.toFixed(4),
      "",
      best >= 0 ? `best ${found.v[best].toFixed(4)}` : "",
      "",
      best >= 0 ? `at step ${whole(found.x[best][0])}` : "",
    );
  }
  if (n.tokens !== null)
    add(
      "Tokens",
      short(n.tokens),
      "",
      n.tokens_per_second ? `${short(n.tokens_per_second)} a second` : "",
    );
  if (n.seconds) add("Step time", ...split(seconds(n.seconds)), "median of the last 100");
  if (n.mfu) add("MFU", ...split(percent(n.mfu)), n.hfu ? `HFU ${percent(n.hfu)}` : "");
  if (n.memory)
    add(
      "Memory peak",
      ...split(bytes(n.memory)),
      n.memory_rank !== null ? `on rank ${n.memory_rank}` : "of a rank",
    );
  const left =
    run.state.kind === "running" && n.last && n.seconds ? (n.last - n.step) * n.seconds : null;
  if (n.wall)
    add(
      "Time",
      duration(n.wall),
      "",
      left ? `${duration(left)} left` : `goodput ${percent(n.share)}`,
      "",
      `goodput ${percent(n.share)}, ${n.starts} starts, ${n.repeated} steps repeated, ${n.saves} saves`,
    );
  return tiles;
}
function runTable(pill) {
  const columns = [
    ["step", (n) => (n.last ? `${whole(n.step)} / ${whole(n.last)}` : whole(n.step))],
    ["loss", (n) => (n.loss === null ? "–" : n.loss.toFixed(4)), (n) => n.loss],
    [
      "held out",
      (n) => (n.evaluation === null ? "–" : n.evaluation.toFixed(4)),
      (n) => n.evaluation,
    ],
    ["tokens", (n) => short(n.tokens)],
    ["tokens/s", (n) => short(n.tokens_per_second), (n) => -n.tokens_per_second],
    ["step time", (n) => seconds(n.seconds)],
    ["MFU", (n) => percent(n.mfu), (n) => -n.mfu],
    ["memory", (n) => bytes(n.memory), (n) => n.memory],
    ["time", (n) => duration(n.wall)],
    ["goodput", (n) => percent(n.share), (n) => -n.share],
  ].filter(([, show]) => runs.some((run) => show(run.numbers) !== "–"));
  const best = columns.map(([, , rank]) => {
    const ranks = rank
      ? runs.map((run) => rank(run.numbers)).filter((x) => isNumber(x) && x !== 0)
      : [];
    return ranks.length > 1 && new Set(ranks).size > 1 ? Math.min(...ranks) : null;
  });
  const rows = runs.map((run, index) => {
    const button = make(
      "button",
      { type: "button", title: "Show or hide", "aria-pressed": String(isShown(index)) },
      make("i", { class: "swatch", style: { background: `var(--${runColor(index)})` } }),
      make("bdi", { text: run.name }),
    );
    const row = make(
      "tr",
      { class: isShown(index) ? "" : "off" },
      make("th", { scope: "row" }, button),
      make("td", {}, pill(run)),
      ...columns.map(([, show, rank], c) =>
        make("td", {
          class: `n ${best[c] !== null && rank(run.numbers) === best[c] ? "best" : ""}`,
          text: show(run.numbers),
        }),
      ),
    );
    button.addEventListener("click", () => {
      choice.off = isShown(index)
        ? [...choice.off, index]
        : choice.off.filter((other) => other !== index);
      row.className = isShown(index) ? "" : "off";
      button.setAttribute("aria-pressed", String(isShown(index)));
      keepChoice();
      redrawAll();
    });
    return row;
  });
  return make(
    "article",
    { class: "card w12 scroll" },
    make(
      "table",
      { class: "runs" },
      make(
        "thead",
        {},
        make(
          "tr",
          {},
          make("th", { text: "run" }),
          make("th", { text: "state" }),
          ...columns.map(([name]) => make("th", { class: "n", text: name })),
        ),
      ),
      make("tbody", {}, ...rows),
    ),
  );
}
