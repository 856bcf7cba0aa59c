// Interactive figures whose legend shows the values at a length, and tables that a click on a column header sorts.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const NICE = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 10]; // ticks of a logarithmic axis, times powers of ten
const MOST_BANDS = 6; // of more curves, only the one whose name is under the pointer has a band
const MOST_SEEDS = 5; // of more seeds, the legend shows only the lowest and the highest value
const number = (x) => (!isFinite(x) ? "∞" : x >= 1000 ? x.toFixed(0) : x >= 100 ? x.toFixed(1) : x >= 10 ? x.toFixed(2) : x.toFixed(3));
const signed = (x, digits) => `${x > 0 ? "+" : ""}${x.toFixed(digits)}`;
const percent = (x) => `${signed(x, 1)}%`;

// The vertical axes. `of` returns the values of a strategy's curve in the unit of the axis: [middle, low, high].
const AXES = {
  log: { label: "logarithmic", log: true, of: (s) => [s.mean, minus(s), plus(s)] },
  linear: { label: "linear", of: (s) => [s.mean, minus(s), plus(s)] },
  start: {
    label: "relative to the value at the shortest length", percent: true,
    of: (s) => [s.mean, minus(s), plus(s)].map((v) => v.map((x) => (x === null || !s.mean[0] ? null : 100 * (x / s.mean[0] - 1)))),
  },
  baseline: {
    label: `relative to ${DATA.baseline}`, percent: true,
    of: (s) => [s.ratio, s.ratio_low, s.ratio_high].map((v) => v.map((x) => (x === null ? null : 100 * (x - 1)))),
  },
  gain: { label: "windowed - full (nats per token)", of: (s) => [s.mean, s.low, s.high] },
};
const minus = (s) => s.mean.map((m, i) => (m === null ? null : m - (s.std[i] || 0)));
const plus = (s) => s.mean.map((m, i) => (m === null ? null : m + (s.std[i] || 0)));

class Figure {
  constructor(root, metric) {
    this.root = root;
    this.metric = metric;
    this.hidden = new Set();
    this.protocol = metric.protocols[0];
    this.axis = metric.axes[0];
    this.element = root.querySelector(".plot");
    this.choose(".protocol", metric.protocols.map((p) => p.name), metric.protocols.map((p) => p.name), (name) => {
      this.protocol = metric.protocols.find((p) => p.name === name);
    });
    this.choose(".axis", metric.axes, metric.axes.map((a) => AXES[a].label), (name) => (this.axis = name));
    new ResizeObserver(() => this.element.clientWidth !== this.width && this.draw()).observe(this.element);
    this.draw();
  }

  choose(selector, values, labels, set) {
    const select = this.root.querySelector(selector);
    select.replaceChildren(...values.map((value, i) => new Option(labels[i], value)));
    select.parentElement.hidden = values.length < 2;
    select.addEventListener("change", () => { set(select.value); this.draw(); });
  }

  shown() {
    return this.curves.filter((c) => !this.hidden.has(c.name));
  }

  // The range of the vertical axis for the shown curves.
  range() {
    const axis = AXES[this.axis], values = this.shown().flatMap((c) => c.middle).filter((y) => y !== null);
    if (!values.length) return [0, 1];
    let low = Math.min(...values), high = Math.max(...values);
    // the limits keep small differences visible; a curve may leave the axis
    if (axis.log) high = Math.min(high, low + Math.log10(4));
    else if (axis.percent) high = Math.min(high, 60), low = Math.max(low, -60);
    else if (this.axis === "gain") low = Math.max(low, -3 * Math.max(high, 0.005));
    const margin = (high - low || Math.abs(high) || 1) * 0.06;
    return [low - margin, high + margin];
  }

  draw() {
    this.list(); // first, because the width of the legend determines that of the figure
    const { protocol, metric } = this, axis = AXES[this.axis], { lengths } = protocol, last = lengths.length - 1;
    const width = (this.width = this.element.clientWidth), height = Math.max(300, Math.min(460, width * 0.6));
    const to = axis.log ? Math.log10 : (y) => y, from = axis.log ? (y) => 10 ** y : (y) => y;
    const octaves = this.axis === "gain" || (last > 0 && lengths[last] / lengths[0] >= 2 ** (last - 1));
    const across = octaves ? Math.log2 : (x) => x;
    this.curves = protocol.strategies.map((s) => {
      const [middle, low, high] = axis.of(s).map((v) => v.map((y) => (y === null || !isFinite(y) ? null : to(y))));
      return { ...s, middle, low, high };
    });
    const font = width < 480 ? 10 : 12, longest = Math.max(...this.curves.map((c) => c.name.length));
    if (this.chart) this.chart.destroy();
    this.chart = new uPlot(
      {
        width,
        height,
        padding: [18, Math.min(longest * font * 0.6 + 22, width * 0.35), 0, 0], // the names at the curves' ends
        legend: { show: false },
        cursor: { drag: { x: true, y: true, uni: 20 }, points: { size: 7 } },
        scales: { x: { time: false, range: (u, low, high) => [low - (high - low) * 0.03, high + (high - low) * 0.03] }, y: { range: () => this.range() } },
        axes: [
          { label: protocol.across, splits: () => ticksAcross(lengths, width * 0.8).map(across),
            values: (u, at) => at.map((x) => Math.round(octaves ? 2 ** x : x).toLocaleString("en")), grid: { stroke: "#eee" } },
          { label: axis.log || this.axis === "linear" ? metric.name.toLowerCase() : axis.label, size: 62,
            splits: (u, i, low, high) => (axis.log ? ticksLog(low, high) : ticksLinear(low, high)),
            values: (u, at) => at.map((y) => (axis.percent ? percent(y) : String(+from(y).toPrecision(3)))), grid: { stroke: "#eee" } },
        ],
        series: [
          {},
          ...this.curves.map((c) => ({
            label: c.name, stroke: c.colour, width: c.name === DATA.baseline ? 3.5 : 2, dash: c.dash,
            show: !this.hidden.has(c.name), points: { size: 6, show: true },
          })),
        ],
        hooks: {
          drawClear: [(u) => this.bands(u)],
          draw: [(u) => protocol.trained && mark(u, across(protocol.trained)), (u) => labelEnds(u, this.shown(), font, this.focused)],
          setCursor: [(u) => u.cursor.left >= 0 && u.cursor.idx !== null && this.showValues(u.cursor.idx)],
        },
      },
      [lengths.map(across), ...this.curves.map((c) => c.middle)],
      this.element,
    );
  }

  bands(u) {
    const shown = this.shown(), focused = shown.filter((c) => c.name === this.focused);
    (focused.length || shown.length > MOST_BANDS ? focused : shown).forEach((c) => band(u, c));
  }

  // The legend: a row for each strategy. A click on its name hides or shows the curve.
  list() {
    const { strategies, lengths } = this.protocol, columns = (this.columns = columnsOf(this.metric, this.protocol));
    const table = document.createElement("table"), head = line("th", ["", ...columns.map((c) => c.title)]);
    this.caption = element("caption", "");
    this.rows = strategies.map((s, i) => {
      const name = document.createElement("button"), row = line("td", ["", ...columns.map(() => "")]);
      name.append(swatch(s), s.name);
      name.setAttribute("aria-pressed", !this.hidden.has(s.name));
      name.addEventListener("click", () => this.toggle(i, name));
      row.firstChild.append(name);
      row.addEventListener("mouseenter", () => this.focus(s.name));
      row.addEventListener("mouseleave", () => this.focus(null));
      return row;
    });
    table.append(this.caption, head, ...this.rows);
    this.root.querySelector(".legend").replaceChildren(table);
    // each column has the width of its widest value at any length, so that the layout does not change
    const widths = lengths.map((_, at) => (this.showValues(at), [...head.children].map((cell) => cell.getBoundingClientRect().width)));
    [...head.children].forEach((cell, i) => (cell.style.width = cell.style.minWidth = `${Math.max(...widths.map((w) => w[i]))}px`));
  }

  toggle(i, button) {
    const { name } = this.curves[i], show = this.hidden.delete(name);
    if (!show) this.hidden.add(name);
    button.setAttribute("aria-pressed", show);
    this.chart.setSeries(i + 1, { show });
    const [min, max] = this.range();
    this.chart.setScale("y", { min, max });
  }

  focus(name) {
    this.focused = name;
    this.chart.series.forEach((s) => (s.alpha = !name || s.label === name ? 1 : 0.15));
    this.chart.redraw(false);
  }

  // Show the values at the i-th length in the legend; the best value is bold.
  showValues(i) {
    const { trained, lengths, strategies, tokens } = this.protocol, long = lengths[i].toLocaleString("en");
    const times = trained ? ` (${+(lengths[i] / trained).toPrecision(3)}×)` : "";
    this.caption.textContent = (this.axis === "gain" ? `at a distance of ${long} tokens` : tokens ? `at ${long} tokens` : `at length ${long}`) + times;
    const best = (this.metric.lower ? Math.min : Math.max)(...strategies.map((s) => s.mean[i]).filter((x) => x !== null));
    strategies.forEach((s, j) => {
      this.columns.forEach(({ text }, k) => (this.rows[j].children[k + 1].textContent = text(s, i)));
      this.rows[j].children[1].classList.toggle("best", s.mean[i] === best);
    });
  }
}

// The columns of a legend: their titles, and the text of a strategy's cell at the i-th length.
function columnsOf(metric, { strategies }) {
  if (metric.axes[0] === "gain")
    return [
      { title: "nats", text: (s, i) => (s.mean[i] === null ? "–" : signed(s.mean[i], 4)) },
      { title: "95% interval", text: (s, i) => (s.low[i] === null ? "–" : `[${signed(s.low[i], 4)}, ${signed(s.high[i], 4)}]`) },
    ];
  const several = strategies.some((s) => Object.keys(s.seeds).length > 1);
  const mean = (s, i) => (s.mean[i] === null ? "–" : number(s.mean[i]) + (s.std[i] === null ? "" : ` ± ${number(s.std[i])}`));
  const columns = [{ title: several ? "mean" : metric.name.toLowerCase(), text: mean }];
  if (strategies.some((s) => s.ratio_low.some((x) => x !== null)))
    columns.push({
      title: `÷ ${DATA.baseline}`,
      text: (s, i) => (s.ratio_low[i] === null ? "–" : `${s.ratio[i].toFixed(3)} [${s.ratio_low[i].toFixed(3)}, ${s.ratio_high[i].toFixed(3)}]`),
    });
  if (several)
    columns.push({
      title: "seeds",
      text: (s, i) => {
        const values = Object.values(s.seeds).map((v) => v[i]).filter((x) => x !== null);
        return values.length > MOST_SEEDS ? `${number(Math.min(...values))} to ${number(Math.max(...values))}` : values.map(number).join(", ");
      },
    });
  return columns;
}

// A piece of a drawn curve: its colour and its dashes.
function swatch({ colour, dash }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), piece = document.createElementNS(svg.namespaceURI, "path");
  svg.setAttribute("viewBox", "0 0 32 10");
  Object.entries({ d: "M0 5H32", stroke: colour, "stroke-width": 3, "stroke-dasharray": dash.join(" ") }).forEach(([k, v]) => piece.setAttribute(k, v));
  svg.append(piece);
  return svg;
}

// Names at the right ends of the curves, without overlaps; ↑ and ↓ mark curves that end outside the figure.
function labelEnds(u, curves, font, focused) {
  const ratio = devicePixelRatio, { left, top, width, height } = u.bbox, right = left + width;
  const ends = curves.flatMap((c) => {
    const i = c.middle.findLastIndex((y) => y !== null);
    if (i < 0) return [];
    const y = u.valToPos(c.middle[i], "y", true), out = y < top ? " ↑" : y > top + height ? " ↓" : "";
    return [{ c, out, wanted: y, x: u.valToPos(u.data[0][i], "x", true), end: Math.max(top, Math.min(top + height, y)) }];
  });
  ends.sort((a, b) => a.wanted - b.wanted);
  const gap = Math.min(font * 1.15 * ratio, height / ends.length);
  ends.forEach((e, i) => (e.y = i ? Math.max(e.end, ends[i - 1].y + gap) : e.end));
  for (let i = ends.length - 1, low = top + height; i >= 0; i--, low -= gap) ends[i].y = Math.min(ends[i].y, low);
  u.ctx.save();
  u.ctx.font = `${font * ratio}px system-ui, sans-serif`;
  u.ctx.textAlign = "left";
  u.ctx.textBaseline = "middle";
  ends.forEach(({ c, out, x, end, y }) => {
    u.ctx.globalAlpha = !focused || c.name === focused ? 1 : 0.15;
    u.ctx.strokeStyle = u.ctx.fillStyle = c.colour;
    u.ctx.fillText(c.name + out, right + 12 * ratio, y);
    u.ctx.globalAlpha *= 0.5;
    u.ctx.beginPath();
    u.ctx.moveTo(out ? right : Math.min(x + 5 * ratio, right), end);
    u.ctx.lineTo(right + 10 * ratio, y);
    u.ctx.stroke();
  });
  u.ctx.restore();
}

function line(kind, texts) {
  const row = document.createElement("tr");
  row.append(...texts.map((text) => element(kind, text)));
  return row;
}

function element(kind, text) {
  const made = document.createElement(kind);
  made.textContent = text;
  return made;
}

// The band of a curve from its low to its high values.
function band(u, curve) {
  const points = u.data[0].map((x, i) => [x, curve.low[i], curve.high[i]]).filter(([, low, high]) => low !== null && high !== null);
  if (points.length < 2) return;
  const at = (x, y) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];
  u.ctx.save();
  u.ctx.beginPath();
  u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  u.ctx.clip();
  u.ctx.beginPath();
  points.forEach(([x, , high]) => u.ctx.lineTo(...at(x, high)));
  points.reverse().forEach(([x, low]) => u.ctx.lineTo(...at(x, low)));
  u.ctx.globalAlpha = 0.15;
  u.ctx.fillStyle = curve.colour;
  u.ctx.fill();
  u.ctx.restore();
}

// The training length: a dotted line with a label above the frame.
function mark(u, x) {
  if (x < u.scales.x.min || x > u.scales.x.max) return;
  const left = Math.round(u.valToPos(x, "x", true)), ratio = devicePixelRatio;
  u.ctx.save();
  u.ctx.strokeStyle = u.ctx.fillStyle = "#333";
  u.ctx.setLineDash([2 * ratio, 3 * ratio]);
  u.ctx.beginPath();
  u.ctx.moveTo(left, u.bbox.top);
  u.ctx.lineTo(left, u.bbox.top + u.bbox.height);
  u.ctx.stroke();
  u.ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  u.ctx.textAlign = left - u.bbox.left < 60 * ratio ? "left" : "center";
  u.ctx.textBaseline = "bottom";
  u.ctx.fillText("trained", left, u.bbox.top - 3 * ratio);
  u.ctx.restore();
}

function ticksLog(low, high) {
  const all = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) NICE.forEach((n) => all.push(power + Math.log10(n)));
  const inside = [...new Set(all.filter((y) => y >= low && y <= high))];
  return inside.length < 3 ? ticksLinear(10 ** low, 10 ** high).filter((y) => y > 0).map(Math.log10) : every(inside, 8);
}

function ticksLinear(low, high) {
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((n) => n * power >= rough) * power, found = [];
  for (let y = Math.ceil(low / step) * step; y <= high; y += step) found.push(Math.abs(y) < step / 1e6 ? 0 : +y.toPrecision(12));
  return found;
}

const every = (ticks, most) => ticks.filter((_, i) => i % Math.ceil(ticks.length / most) === 0);
const ticksAcross = (lengths, width) => every(lengths, Math.max(3, Math.floor(width / 62)));

// Sort the rows of a table by a column. Rows without a number are last. A second click reverses the order.
function sortable(table) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.tabIndex = 0;
    const sort = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.children[column].textContent.trim();
      const value = (row) => parseFloat(key(row).replace(/,/g, ""));
      const rows = [...table.tBodies[0].rows];
      const numbers = rows.some((row) => !isNaN(value(row)));
      rows.sort((a, b) => {
        if (!numbers) return (down ? -1 : 1) * key(a).localeCompare(key(b));
        if (isNaN(value(a)) || isNaN(value(b))) return isNaN(value(a)) - isNaN(value(b));
        return (down ? -1 : 1) * (value(a) - value(b));
      });
      table.tBodies[0].append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  });
}

document.querySelectorAll(".figure").forEach((root, i) => new Figure(root, DATA.figures[i]));
document.querySelectorAll("table").forEach((table) => table.tHead && sortable(table));
