/* The panels, in the order in which they stand. */

function buildCurves() {
  for (const name of ["loss", "perplexity", "memory_rank"]) usedNames.add(name); // a rank is no curve, a perplexity no other one
  const evaluations = runs.flatMap((run, index) =>
    run.evaluations["eval/loss"]
      ? [
          {
            run,
            name: "eval/loss",
            label: several ? `${run.name}, held out` : "held out",
            color: several ? runColor(index) : "c1",
          },
        ]
      : [],
  );
  let loss = null;
  if (has("loss") || evaluations.length) {
    const sources = sourcesOf("loss").map((source) =>
      several ? source : { ...source, label: "training" },
    );
    loss = curveCard({
      id: "loss",
      title: "Loss",
      unit: "nats per token",
      format: "plain",
      width: "w8 tall",
      sources,
      evaluations,
      canLog: true,
      marks: ["nonfinite"],
    });
  }
  const side = [
    simpleCard("lr", "Learning rate", "", "plain", "lr", {
      zero: true,
      canLog: true,
      all: true,
      exact: true,
    }),
    simpleCard("norm", "Gradient norm", "before clipping", "plain", "grad_norm", {
      canLog: true,
      marks: ["skipped", "nonfinite"],
    }),
  ].filter(Boolean);
  const terms = namesWith("loss/").map((name) =>
    simpleCard(name, capital(name.slice(5)), "term of the loss", "plain", name, { canLog: true }),
  );
  const other = [...new Set(runs.flatMap((run) => Object.keys(run.evaluations)))]
    .filter((name) => !["eval/loss", "eval/perplexity"].includes(name))
    .map((name) => {
      const list = runs.flatMap((run, index) =>
        run.evaluations[name]
          ? [{ run, name, label: several ? run.name : name.slice(5), color: runColor(index) }]
          : [],
      );
      return curveCard({
        id: name,
        title: capital(name.slice(5)),
        unit: "held out",
        format: "plain",
        sources: [],
        evaluations: list,
        now: several ? null : plain(runs[0].evaluations[name].v.findLast(isNumber)),
      });
    });
  if (loss && side.length < 2) {
    loss.node.classList.remove("tall");
    loss.node.classList.add(side.length ? "w8" : "w12");
    loss.node.querySelector(".plot").style.height = "300px";
  }
  const further = [...terms, ...other].filter(Boolean);
  if (further.length === 1) {
    further[0].node.querySelector(".plot").classList.add("low");
    further[0].spec.low = true;
  }
  addSection("learning", "Learning", [loss, ...side, ...further]);
  if (loss) addLane(loss);
}

// In the order of a step. `wait` is for other ranks, between the phases. `device` is where the host waits for what it has queued there.
const PHASES = {
  data: "c5",
  wait: "bad",
  forward: "c6",
  backward: "c0",
  reduce: "c1",
  step: "c2",
  device: "c4",
  evaluate: "c3",
  save: "ink-2",
  log: "c7",
  other: "ink-3",
  garbage: "ink-3",
};
const colorOfPhase = (name) => PHASES[name.slice(8)] || "ink-3";
const mean = (values) => values.reduce((sum, x) => sum + (x || 0), 0) / (values.length || 1);
const meanOf = (run, name) => mean(run.series[name]?.m || run.series[name]?.v || []);

/** Step time, phase on phase; phases without any time are left out. */
function phaseCard(run, phases) {
  const order = Object.keys(PHASES).map((name) => `seconds/${name}`);
  const place = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  const total = phases.reduce((sum, name) => sum + meanOf(run, name), 0);
  const share = (name) => meanOf(run, name) / (total || 1);
  const names = phases
    .filter((name) => run.series[name] && share(name) > 0.0005)
    .sort((a, b) => place(a) - place(b));
  return curveCard({
    id: `phases-${runs.indexOf(run)}`,
    title: "Step time by phase",
    unit: several ? run.name : "",
    format: "seconds",
    stack: true,
    zero: true,
    totals: Object.fromEntries(
      names.map((name) => [name, `${(100 * share(name)).toFixed(share(name) < 0.1 ? 1 : 0)} %`]),
    ),
    width: several ? "w6" : "w8",
    sources: names.map((name) => ({
      run,
      name,
      label: name.slice(8),
      color: colorOfPhase(name),
    })),
  });
}

function buildSpeed() {
  for (const name of ["seconds", "documents_per_second", "memory_reserved"]) usedNames.add(name);
  const phases = namesWith("seconds/");
  phases.forEach((name) => usedNames.add(name));
  const timed = runs.filter((run) => phases.some((name) => run.series[name]));
  const label = (name) => name.slice(8);
  const stacked =
    timed.length && runs.length > 2
      ? [barCard("phases", "Step time by phase", "mean", phases, colorOfPhase, label, seconds)]
      : timed.map((run) => phaseCard(run, phases));
  const plainTime = simpleCard("seconds", "Step time", "", "seconds", "seconds", { zero: true });
  const isOne = stacked.length === 1 && !several; // then throughput stands beside it
  addSection("speed", "Speed and memory", [
    ...stacked,
    isOne ? null : plainTime,
    simpleCard("rate", "Throughput", "tokens a second", "short", "tokens_per_second", {
      zero: true,
    }),
    pairCard(
      "mfu",
      "Utilization",
      "of peak FLOP/s",
      "percent",
      [
        ["mfu", "MFU"],
        ["hfu", "HFU"],
      ],
      { zero: true, main: "mfu" },
    ),
    pairCard(
      "memory",
      "Memory",
      "worst rank",
      "bytes",
      [
        ["memory", "allocated"],
        ["memory_reserved", "reserved"],
        ["memory_peak", "peak"],
      ],
      { zero: true, all: true, exact: true, main: "memory_peak" },
    ),
    isOne ? plainTime : null,
    ...runs.filter((run) => run.profiles.length).map(profileCard),
  ]);
}

/** The dearest operations of a profile, each with its share of the time that was profiled. */
function profileCard(run) {
  const [{ first, step, seconds: time, idle, operations }] = run.profiles;
  const header = {
    title: "Profile",
    unit: `${several ? `${run.name}, ` : ""}steps ${whole(first)} to ${whole(step)}`,
  };
  const dearest = Math.max(...operations.map((one) => one.seconds || 0));
  const rows = operations.map(({ name, calls, seconds: own }) =>
    make(
      "tr",
      {},
      make("td", { class: "wrap", text: name }),
      make("td", { class: "n", text: short(calls) }),
      make("td", { class: "n", text: seconds(own) }),
      make(
        "td",
        { class: "share" },
        make("i", { style: { width: `${Math.min(100, (100 * own) / dearest)}%` } }),
      ),
      make("td", { class: "n", text: percent(own / time) }),
    ),
  );
  const right = make("div", { class: "right now", text: `idle ${percent(idle)}` });
  const heads = ["operation", "calls", "own time", "", ""].map((text, i) =>
    make("th", { class: i ? "n" : "", text }),
  );
  const table = make(
    "table",
    {},
    make("thead", {}, make("tr", {}, ...heads)),
    make("tbody", {}, ...rows),
  );
  const body = make("div", { class: "scroll" }, table);
  return {
    node: make(
      "article",
      {
        class: `card ${runs.filter((each) => each.profiles.length).length > 1 ? "w6" : "w12"} profile`,
      },
      makeHeader(header, [], right),
      body,
    ),
  };
}

function buildData() {
  const groups = namesWith("tokens/");
  const isMixed = groups.length > 1; // one corpus is always all of it
  for (const name of [
    ...groups,
    ...namesWith("rows/"),
    "tokens",
    "tokens_processed",
    "documents",
    "trained_tokens_per_second",
  ])
    usedNames.add(name);
  const corpora =
    isMixed && runs.length > 2
      ? [
          barCard(
            "corpora",
            "Tokens by corpus",
            "share",
            groups,
            (name) => runColor(groups.indexOf(name)),
            (name) => name.slice(7),
            null,
          ),
        ]
      : isMixed
        ? runs
            .filter((run) => groups.some((name) => run.series[name]))
            .map((run) => {
              const names = groups.filter((name) => run.series[name]);
              const sums = Object.fromEntries(
                names.map((name) => [
                  name,
                  (run.series[name].m || run.series[name].v).reduce((sum, x) => sum + (x || 0), 0),
                ]),
              );
              const total = Object.values(sums).reduce((a, b) => a + b, 0);
              return curveCard({
                id: `corpora-${runs.indexOf(run)}`,
                title: "Tokens by corpus",
                unit: several ? run.name : "share of a step",
                format: "percent",
                stack: true,
                share: true,
                zero: true,
                all: true,
                width: several ? "w6" : "",
                totals: Object.fromEntries(
                  names.map((name) => [name, percent(sums[name] / total)]),
                ),
                sources: names.map((name, at) => ({
                  run,
                  name,
                  label: name.slice(7),
                  color: runColor(at),
                })),
              });
            })
        : [];
  const packed = runs.filter((run) => run.packing.length);
  const tables = isSame(packed, (run) => run.packing)
    ? packed.slice(0, 1).map((run) => packingCard(run, ""))
    : packed.map((run) => packingCard(run, run.name));
  addSection("data", "Data", [
    ...corpora,
    runs.some((run) => spread(run.series.tokens) > 0.03)
      ? pairCard(
          "tokens",
          "Tokens a step",
          "",
          "short",
          [
            ["tokens", "with a loss"],
            ["tokens_processed", "processed"],
          ],
          { zero: true, all: true, main: "tokens" },
        )
      : null,
    simpleCard("padding", "Padding", "share of a row", "percent", "padding", { zero: true }),
    simpleCard("documents", "Documents", "a second", "short", "documents_per_second", {
      zero: true,
    }),
    ...tables,
  ]);
}
/** One bar for each run, of the means of its parts; as shares of a whole where there is no format. */
function barCard(id, title, unit, names, colorOf, labelOf, format) {
  const sums = runs.map((run) => names.reduce((sum, name) => sum + meanOf(run, name), 0));
  const legend = make(
    "div",
    { class: "legend" },
    ...names.map((name) =>
      make(
        "span",
        {},
        make("i", {
          class: "swatch",
          style: { background: `color-mix(in srgb, var(--${colorOf(name)}) 72%, var(--card))` },
        }),
        make("bdi", { text: labelOf(name) }),
      ),
    ),
  );
  const rows = runs.flatMap((run, index) => {
    if (!sums[index]) return [];
    const whole = format ? Math.max(...sums) : sums[index];
    const parts = names.map((name) => {
      const part = meanOf(run, name);
      return make("i", {
        title: `${labelOf(name)} ${format ? `${format(part)}, ` : ""}${percent(part / sums[index])}`,
        style: {
          width: `${(100 * part) / whole}%`,
          background: `color-mix(in srgb, var(--${colorOf(name)}) 72%, var(--card))`,
        },
      });
    });
    return [
      make("span", { class: "name" }, swatch(index), make("bdi", { text: run.name })),
      make("span", { class: "bar-parts" }, ...parts),
      make("span", { class: "n", text: format ? format(sums[index]) : "" }),
    ];
  });
  return {
    node: make(
      "article",
      { class: "card w6", "data-card": id },
      makeHeader({ title, unit }, [legend], null),
      make("div", { class: "bars" }, ...rows),
    ),
  };
}
function packingCard(run, name) {
  const columns = [
    ["corpus", "corpus"],
    ["tokens", "tokens", short],
    ["rows", "rows", short],
    ["documents", "documents", short],
    ["efficiency", "full", percent],
  ].filter(([key]) => run.packing.some((row) => row[key] !== undefined && row[key] !== null));
  return make(
    "article",
    { class: "card" },
    make(
      "header",
      {},
      make("h3", { text: "Packing" }),
      make("span", { class: "unit", text: name }),
    ),
    make(
      "div",
      { class: "scroll" },
      make(
        "table",
        {},
        make(
          "thead",
          {},
          make(
            "tr",
            {},
            ...columns.map(([, label, show]) =>
              make("th", { class: show ? "n" : "", text: label }),
            ),
          ),
        ),
        make(
          "tbody",
          {},
          ...run.packing.map((row) =>
            make(
              "tr",
              {},
              ...columns.map(([key, , show]) =>
                make("td", {
                  class: show ? "n" : "wrap",
                  text: show ? show(row[key]) : (row[key] ?? ""),
                }),
              ),
            ),
          ),
        ),
      ),
    ),
  );
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
    simpleCard(
      "load_over_mean",
      "Busiest expert",
      "load over the mean, worst layer",
      "short",
      "load_over_mean",
    ),
    simpleCard(
      "load_entropy",
      "Entropy of loads",
      "1 is balanced, worst layer",
      "plain",
      "load_entropy",
    ),
    simpleCard("expert_bias", "Bias of experts", "largest of a layer", "plain", "expert_bias"),
    simpleCard("dropped_share", "Dropped choices", "worst layer", "percent", "dropped_share", {
      zero: true,
    }),
  ];
  if (cards.length === 1) {
    cards[0].node.classList.remove("w6");
    cards[0].node.classList.add("w12");
  }
  addSection("inside", "Inside the model", [...cards, ...balance]);
}
/** Names without the end that all weights share. */
const shorten = (names) =>
  names.map((name) => (name.endsWith(".weight") ? name.slice(0, -7) : name));
function layerCard(run, kinds) {
  let [kind, stat] = (choice.layer || "").split(".");
  if (!kinds.some((layer) => layer.kind === kind))
    kind = (kinds.find((layer) => layer.kind === "gradient") || kinds[0]).kind;
  const get = () => kinds.find((layer) => layer.kind === kind);
  if (!get().stats[stat]) stat = Object.keys(get().stats)[0];
  const kindGroup = make("span", { class: "segment small", role: "group", "aria-label": "What" });
  const statGroup = make("span", {
    class: "segment small",
    role: "group",
    "aria-label": "Statistic",
  });
  const card = heatCard({
    id: "layers",
    title: "By layer",
    unit: several ? run.name : "",
    width: "w6",
    height: 420,
    controls: [kindGroup, statGroup],
    get: () => ({
      x: get().x.map((x) => x[AXIS_INDEX[choice.axis]]),
      rows: shorten(get().names),
      values: get().stats[stat],
      kind: ["zeros", "nonfinite"].includes(stat) ? "linear" : "log",
      format: ["zeros", "nonfinite"].includes(stat) ? "percent" : "short",
    }),
  });
  const fill = () => {
    kindGroup.replaceChildren(
      ...kinds.map((layer) =>
        make("button", {
          type: "button",
          text: layer.kind,
          "aria-pressed": String(layer.kind === kind),
          on: { click: () => pick(layer.kind, stat) },
        }),
      ),
    );
    statGroup.replaceChildren(
      ...Object.keys(get().stats).map((name) =>
        make("button", {
          type: "button",
          text: STATS[name],
          "aria-pressed": String(name === stat),
          on: { click: () => pick(kind, name) },
        }),
      ),
    );
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
  const shown =
    layers <= 4
      ? [...Array(layers).keys()]
      : [0, 1, 2, 3].map((i) => Math.round((i * (layers - 1)) / 3));
  const rows = shown.flatMap((layer) =>
    load[0][layer].map((_, expert) => `layer ${layer}, expert ${expert}`),
  );
  const groups = shown.map((layer, at) => ({
    label: `layer ${layer}`,
    first: at * load[0][0].length,
    count: load[0][0].length,
  }));
  const width = (last - first + 1) / load.length;
  const position = (step) => {
    const i = run.x.step.findIndex((x) => x >= step);
    return (run.x[choice.axis] || run.x.step)[i < 0 ? run.x.step.length - 1 : i];
  };
  return [
    heatCard({
      id: "experts",
      title: "Expert load",
      unit: `${several ? `${run.name}, ` : ""}over the mean of the layer${shown.length < layers ? `; ${shown.length} of ${layers} layers` : ""}`,
      width: "w6",
      height: 420,
      get: () => ({
        x: load.map((_, i) => position(first + (i + 1) * width - 1)),
        rows,
        groups,
        values: load.map((column) => shown.flatMap((layer) => column[layer])),
        kind: "diverging",
        format: "short",
      }),
    }),
  ];
}

function buildRest() {
  const isOfLayer = /^(load_over_mean|load_entropy|expert_bias|dropped_share)\/\d+$/; // the heat map shows them
  const rest = [...new Set(runs.flatMap((run) => Object.keys(run.series)))].filter(
    (name) => !usedNames.has(name) && !isOfLayer.test(name),
  );
  addSection(
    "other",
    "Other metrics",
    rest.map((name) =>
      simpleCard(name, capital(name.replaceAll("_", " ")), "", "plain", name, { canLog: true }),
    ),
  );
}

function buildTables() {
  addSection("samples", "Samples", [sampleCard()]);
  addSection("events", "Events", [eventTable()]);
  const layouts = runs.filter((run) => run.layout);
  const isOne = layouts.length === runs.length && isSame(layouts, (run) => run.layout);
  addSection(
    "layout",
    "Layout",
    (isOne ? layouts.slice(0, 1) : layouts).map((run) => layoutCard(run, several && !isOne)),
  );
  addSection("configuration", "Configuration", [configCard()]);
  const notes = runs.filter((run) => run.notes.length);
  addSection(
    "notes",
    "What this page leaves out",
    notes.map((run) =>
      make(
        "article",
        { class: "card w12" },
        several ? make("header", {}, make("h3", { text: run.name })) : null,
        make("ul", { class: "notes" }, ...run.notes.map((note) => make("li", { text: note }))),
      ),
    ),
  );
}
function sampleCard() {
  const all = runs
    .flatMap((run) => run.samples.map((sample) => ({ ...sample, run })))
    .sort((a, b) => (b.step ?? 0) - (a.step ?? 0));
  if (!all.length) return null;
  const figure = (sample) =>
    make(
      "figure",
      { class: "sample" },
      make(
        "figcaption",
        {},
        make("div", { text: isNumber(sample.step) ? `step ${whole(sample.step)}` : "" }),
        several ? make("bdi", { text: sample.run.name }) : null,
      ),
      make(
        "pre",
        {},
        sample.prompt ? make("span", { class: "prompt", text: sample.prompt }) : null,
        document.createTextNode(sample.text),
      ),
    );
  return make(
    "article",
    { class: "card w12" },
    ...all.slice(0, 3).map(figure),
    all.length > 3
      ? make(
          "details",
          {},
          make("summary", { text: `${all.length - 3} more` }),
          ...all.slice(3).map(figure),
        )
      : null,
  );
}
function layoutCard(run, isNamed) {
  const { title, rows, ranks } = run.layout;
  const mesh = make("div", {
    class: "mesh",
    style: { "grid-template-columns": `max-content repeat(${ranks}, minmax(17px, 1fr))` },
  });
  rows.forEach((row) => {
    if (row.name === "rank") mesh.append(make("span", { class: "gap" }));
    const isAxis = !["rank", "tokens", "parameters", "experts"].includes(row.name);
    mesh.append(
      make("span", { class: "name", text: row.name }),
      ...row.cells.map(([text, width, shade]) => {
        const tone = isAxis
          ? `color-mix(in srgb, var(--accent) ${shade ? 26 : 13}%, var(--card))`
          : row.name === "rank"
            ? "var(--grid)"
            : `color-mix(in srgb, var(--c${shade % 8}) 22%, var(--card))`;
        return make("span", {
          class: "cell",
          text,
          style: { "grid-column": `span ${width}`, background: tone },
        });
      }),
    );
  });
  return make(
    "article",
    { class: "card w12" },
    make(
      "header",
      {},
      make("h3", { text: `${ranks} ranks` }),
      make("span", { class: "unit", text: `${isNamed ? `${run.name}: ` : ""}${title}` }),
    ),
    rows.length ? mesh : null,
    rows.length
      ? make("p", {
          class: "note",
          text: "A column is a rank; an axis divides those above it. Ranks with the same number of tokens read the same rows, with the same parameters hold the same shards.",
        })
      : null,
  );
}
function configCard() {
  const names = [...new Set(runs.flatMap((run) => run.config.map(([key]) => key)))];
  const software = [...new Set(runs.flatMap((run) => run.software.map(([key]) => key)))];
  if (!names.length && !software.length) return null;
  const pairs = (kind, list) =>
    list.map((key) => [
      key,
      runs.map((run) => run[kind].find(([name]) => name === key)?.[1] ?? "–"),
    ]);
  const all = [...pairs("config", names), ...pairs("software", software)];
  const find = make("input", {
    class: "find",
    type: "search",
    placeholder: "Find a setting",
    "aria-label": "Find a setting",
  });
  const body = make("div", {});
  const fill = () => {
    const shown = all.filter(([key, values]) =>
      `${key} ${values.join(" ")}`.toLowerCase().includes(find.value.toLowerCase()),
    );
    body.replaceChildren(pairList(shown.filter(([, values]) => new Set(values).size === 1)));
  };
  find.addEventListener("input", fill);
  fill();
  const title = several ? "The same in all runs" : "Configuration and software";
  return make(
    "article",
    { class: "card w12" },
    make("header", {}, make("h3", { text: title }), make("div", { class: "right" }, find)),
    body,
  );
}
const pairList = (pairs) =>
  make(
    "dl",
    { class: "pairs" },
    ...pairs.map(([key, [value]]) =>
      make("div", {}, make("dt", { text: key }), make("dd", { text: value })),
    ),
  );
const swatch = (index) =>
  make("i", { class: "swatch", style: { background: `var(--${runColor(index)})` } });
/** Each setting with its values, and the runs that have each. */
const differenceList = (pairs) =>
  make(
    "dl",
    { class: "pairs near" },
    ...pairs.map(([key, values]) =>
      make(
        "div",
        {},
        make("dt", { text: key }),
        make(
          "dd",
          {},
          ...[...new Set(values)].map((value) =>
            make(
              "span",
              { class: "value" },
              ...values.flatMap((other, index) => (other === value ? [swatch(index)] : [])),
              make("bdi", { text: value }),
            ),
          ),
        ),
      ),
    ),
  );
function buildDifferences() {
  if (!several) return;
  const rows = ["config", "software"].flatMap((kind) =>
    [...new Set(runs.flatMap((run) => run[kind].map(([key]) => key)))].map((key) => [
      key,
      runs.map((run) => run[kind].find(([name]) => name === key)?.[1] ?? "–"),
    ]),
  );
  const differing = rows.filter(([key, values]) => new Set(values).size > 1 && key !== "out");
  const card = make(
    "article",
    { class: "card w12" },
    differing.length
      ? differenceList(differing)
      : make("p", { class: "note", text: "Nothing in configuration and software." }),
  );
  addSection("differences", "What differs", [card]);
}
