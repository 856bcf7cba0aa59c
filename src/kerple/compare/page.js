// The page's own behaviour: a figure that is asked questions, and tables that are sorted by a click.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const NICE = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 10];
const number = (x) => (!isFinite(x) ? "∞" : x >= 1000 ? x.toFixed(0) : x >= 100 ? x.toFixed(1) : x >= 10 ? x.toFixed(2) : x.toFixed(3));
const percent = (x) => `${x > 0 ? "+" : ""}${x.toFixed(1)}%`;

// What a curve shows on each axis: [values, low, high], in the units of the axis.
const AXES = {
  log: { label: "logarithmic", show: number, log: true, of: (s) => [s.mean, minus(s), plus(s)] },
  linear: { label: "linear", show: number, of: (s) => [s.mean, minus(s), plus(s)] },
  start: {
    label: "relative to its own at the shortest length", show: percent,
    of: (s) => [s.mean, minus(s), plus(s)].map((v) => v.map((x) => (x === null || !s.mean[0] ? null : 100 * (x / s.mean[0] - 1)))),
  },
  baseline: {
    label: `relative to ${DATA.baseline}`, show: percent,
    of: (s) => [s.ratio, s.ratio_low, s.ratio_high].map((v) => v.map((x) => (x === null ? null : 100 * (x - 1)))),
  },
};
const minus = (s) => s.mean.map((m, i) => (m === null ? null : m - (s.std[i] || 0)));
const plus = (s) => s.mean.map((m, i) => (m === null ? null : m + (s.std[i] || 0)));

class Figure {
  constructor(root, metric) {
    this.root = root;
    this.metric = metric;
    this.hidden = new Set();
    this.protocol = metric.protocols[0];
    this.axis = metric.lower ? "log" : "linear";
    this.place = root.querySelector(".plot");
    this.tip = root.querySelector(".tip");
    const axes = metric.lower ? Object.keys(AXES) : ["linear"];
    this.choose(".protocol", metric.protocols.map((p) => p.name), metric.protocols.map((p) => p.name), (name) => {
      this.protocol = metric.protocols.find((p) => p.name === name);
    });
    this.choose(".axis", axes, axes.map((a) => AXES[a].label), (name) => (this.axis = name));
    new ResizeObserver(() => this.chart && this.chart.setSize(this.size())).observe(this.place);
    this.draw();
  }

  choose(selector, values, labels, set) {
    const select = this.root.querySelector(selector);
    select.replaceChildren(...values.map((value, i) => new Option(labels[i], value)));
    select.parentElement.hidden = values.length < 2;
    select.addEventListener("change", () => { set(select.value); this.draw(); });
  }

  size() {
    return { width: this.place.clientWidth, height: Math.max(280, Math.min(440, this.place.clientWidth * 0.55)) };
  }

  draw() {
    const { protocol } = this, axis = AXES[this.axis];
    const to = axis.log ? Math.log10 : (y) => y, from = axis.log ? (y) => 10 ** y : (y) => y;
    const octaves = protocol.lengths.length > 1 && protocol.lengths.at(-1) / protocol.lengths[0] >= 2 ** (protocol.lengths.length - 2);
    const across = octaves ? Math.log2 : (x) => x;
    this.curves = protocol.strategies.map((s) => {
      const [mid, low, high] = axis.of(s, protocol).map((v) => v.map((y) => (y === null || !isFinite(y) ? null : to(y))));
      return { ...s, mid, low, high };
    });
    const shown = () => this.curves.filter((c) => !this.hidden.has(c.name));
    const range = () => {
      const all = shown().flatMap((c) => c.mid).filter((y) => y !== null);
      if (!all.length) return [0, 1];
      let low = Math.min(...all), high = Math.max(...all);
      if (axis.log) high = Math.min(high, low + Math.log10(4)); // beyond, a curve has said what it has to say
      else if (this.axis !== "linear") high = Math.min(high, 60), low = Math.max(low, -60);
      const margin = (high - low || Math.abs(high) || 1) * 0.06;
      return [low - margin, high + margin];
    };
    if (this.chart) this.chart.destroy();
    this.chart = new uPlot(
      {
        ...this.size(),
        padding: [18, 12, 0, 0],
        cursor: { drag: { x: true, y: true, uni: 20 }, points: { size: 7 } },
        scales: { x: { time: false, range: (u, low, high) => [low - (high - low) * 0.03, high + (high - low) * 0.03] }, y: { range } },
        axes: [
          { label: protocol.tokens ? "evaluation length (tokens)" : "length of the problem", splits: () => ticksAcross(protocol.lengths, this.place.clientWidth).map(across),
            values: (u, at) => at.map((x) => (octaves ? Math.round(2 ** x) : x).toLocaleString("en")), grid: { stroke: "#eee" } },
          { label: axis.log || this.axis === "linear" ? this.metric.name.toLowerCase() : axis.label, size: 62,
            splits: (u, i, low, high) => (axis.log ? ticksLog(low, high) : ticksLinear(low, high)),
            values: (u, at) => at.map((y) => (axis.show === percent ? percent(y) : String(+from(y).toPrecision(3)))), grid: { stroke: "#eee" } },
        ],
        series: [
          { label: "length", value: (u, x) => (x === null ? "" : Math.round(octaves ? 2 ** x : x).toLocaleString("en")) },
          ...this.curves.map((c) => ({
            label: c.name, stroke: c.colour, width: 2, dash: c.dash, show: !this.hidden.has(c.name), points: { size: 6, show: true },
            value: (u, y) => (y === null ? "–" : axis.show(from(y))),
          })),
        ],
        hooks: {
          drawClear: [(u) => shown().forEach((c) => band(u, c))],
          draw: [(u) => protocol.trained && mark(u, across(protocol.trained))],
          setCursor: [(u) => this.tell(u)],
          setSeries: [(u, i, options) => {
            if (i > 0 && "show" in options) {
              const { name } = this.curves[i - 1];
              if (options.show) this.hidden.delete(name); else this.hidden.add(name);
              u.setScale("y", { min: range()[0], max: range()[1] });
            }
          }],
        },
      },
      [protocol.lengths.map(across), ...this.curves.map((c) => c.mid)],
      this.place,
    );
  }

  // Everything that is known at the length under the pointer, best first.
  tell(u) {
    const i = u.cursor.idx;
    this.tip.hidden = i === null || u.cursor.left < 0;
    if (this.tip.hidden) return;
    const { protocol } = this, length = protocol.lengths[i];
    const rows = protocol.strategies.filter((s) => !this.hidden.has(s.name) && s.mean[i] !== null);
    rows.sort((a, b) => (this.metric.lower ? a.mean[i] - b.mean[i] : b.mean[i] - a.mean[i]));
    const times = protocol.trained ? ` (${+(length / protocol.trained).toPrecision(3)}×)` : "";
    const long = length.toLocaleString("en"), head = element("caption", (protocol.tokens ? `${long} tokens` : `length ${long}`) + times);
    const ratios = rows.some((s) => s.ratio_low[i] !== null), several = rows.some((s) => Object.keys(s.seeds).length > 1);
    const titles = ["", several ? "mean" : this.metric.name.toLowerCase(), ...(ratios ? [`÷ ${DATA.baseline}`] : []), ...(several ? ["seeds"] : [])];
    const table = document.createElement("table");
    table.append(head, line("th", titles));
    rows.forEach((s) => {
      const spread = s.std[i] === null ? "" : ` ± ${number(s.std[i])}`;
      const ratio = s.ratio_low[i] === null ? "–" : `${s.ratio[i].toFixed(3)} [${s.ratio_low[i].toFixed(3)}, ${s.ratio_high[i].toFixed(3)}]`;
      const seeds = Object.values(s.seeds).filter((v) => v[i] !== null).map((v) => number(v[i])).join(", ");
      const row = line("td", [s.name, number(s.mean[i]) + spread, ...(ratios ? [ratio] : []), ...(several ? [seeds] : [])]);
      row.firstChild.style.borderLeft = `.5rem solid ${s.colour}`;
      table.append(row);
    });
    this.tip.replaceChildren(table);
    if (getComputedStyle(this.tip).position === "static") return; // a phone has no room beside the pointer
    const left = u.over.offsetLeft + u.cursor.left, width = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, left > this.place.clientWidth / 2 ? left - width - 18 : left + 18)}px`;
  }
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

// The spread over seeds, or the interval of the ratio, behind a curve.
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

// The training length: a dotted line, and its name above the frame, where no curve can be.
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

// Sort a table's rows by a column: numbers by their value, what has none at the end; again: the other way round.
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

document.querySelectorAll(".figure").forEach((root, i) => new Figure(root, DATA.metrics[i]));
document.querySelectorAll("table").forEach((table) => table.tHead && sortable(table));
