/* The tip that follows the cursor, and the keys of a chart. */

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
  return make(
    "div",
    { class: "line" },
    tone ? make("i", { class: "swatch", style: { background: `var(--${tone})` } }) : null,
    make("bdi", { text: label }),
    make("b", { text: value }),
  );
}
function showValues(item) {
  const { plot, spec, lines } = item;
  const index = plot.cursor.idx;
  if (index === null || index === undefined || plot.cursor.left < 0) {
    tip.hidden = true;
    return;
  }
  const at = plot.data[0][index];
  const near = (values, reach) => {
    for (let i = index; i >= Math.max(0, index - reach); i--)
      if (isNumber(values[i])) return values[i];
    return null;
  };
  const rows = lines
    .map((line) => [
      line,
      near(spec.stack ? line.values : plot.data[line.at], line.isEvaluation ? Infinity : 60),
    ])
    .filter(([, value]) => value !== null);
  const format = FORMATS[spec.format];
  const total =
    spec.stack && !spec.share
      ? [tipLine(null, "in all", format(rows.reduce((sum, [, value]) => sum + value, 0)))]
      : [];
  tip.replaceChildren(
    make("h4", { text: `${AXES[choice.axis][0].toLowerCase()} ${AXES[choice.axis][2](at)}` }),
    ...(spec.stack ? rows.reverse() : rows)
      .slice(0, 14)
      .map(([line, value]) => tipLine(line.color, line.label, format(value))),
    ...total,
  );
  const box = plot.over.getBoundingClientRect();
  placeTip(
    box.left + plot.cursor.left,
    box.top + (plot.cursor.top >= 0 ? plot.cursor.top : box.height / 3),
  );
}
function steer(event, item) {
  const [low, high] = view();
  const width = high - low;
  const { plot } = item;
  const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
  if (step && event.shiftKey) setZoom([low + step * width * 0.2, high + step * width * 0.2]);
  else if (step) {
    const [first, last] = plot.series[0].idxs;
    const now =
      plot.cursor.left >= 0 && plot.cursor.idx !== null
        ? plot.cursor.idx
        : step > 0
          ? first - 1
          : last + 1;
    const next = Math.min(
      last,
      Math.max(first, now + step * Math.max(1, Math.round((last - first) / 200))),
    );
    hovered = plot;
    plot.setCursor({ left: plot.valToPos(plot.data[0][next], "x"), top: 10 });
    showValues(item);
  } else if (event.key === "+" || event.key === "=")
    setZoom([low + width * 0.2, high - width * 0.2]);
  else if (event.key === "-") setZoom([low - width / 3, high + width / 3]);
  else if (event.key === "0" || event.key === "Escape") setZoom(null);
  else return;
  event.preventDefault();
}
