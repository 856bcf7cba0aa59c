// Draws the charts with Plotly, and sorts a table after a click on a column header.

const DATA = JSON.parse(document.getElementById("data").textContent);
const DASHES = { "-": "solid", "--": "dash", ":": "dot", "-.": "dashdot" };
const SYMBOLS = { o: "circle", s: "square", D: "diamond", "^": "triangle-up", v: "triangle-down", P: "cross", "*": "star", X: "x" };
const BUTTONS = [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]];

// Plotly would read tags in a text as markup.
const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/\n/g, "<br>");
const column = (points, i) => points.map((point) => point[i]);

// The points of a curve with the difference from the first one in percent.
function relative(points) {
  const difference = (y) => (y === null ? null : 100 * (y / points[0][1] - 1));
  return points.map(([x, y, low, high, text]) => [x, difference(y), difference(low), difference(high), text]);
}

// Two traces of a strategy: its band, and its curve with the texts for the pointer.
function traces(name, points, isCurve, opacity, rank) {
  const { color, linestyle, marker } = DATA.styles[name];
  const inBand = points.filter(([, , low, high]) => low !== null && low < high);
  const x = column(inBand, 0), low = column(inBand, 2), high = column(inBand, 3);
  const band = {
    legendgroup: name, showlegend: false, hoverinfo: "skip", mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: color, opacity,
    x: [...x, ...x.reverse()], y: [...high, ...low.reverse()],
  };
  const curve = {
    legendgroup: name, legendrank: rank, name: escape(name), x: column(points, 0), y: column(points, 1),
    text: column(points, 4).map(escape), hovertemplate: "<b>%{fullData.name}</b><br>at %{x}: %{text}<extra></extra>",
    mode: !isCurve ? "markers" : points.length > 16 ? "lines" : "lines+markers",
    line: { color, dash: DASHES[linestyle], width: 2 }, marker: { color, symbol: SYMBOLS[marker], size: isCurve ? 6 : 9 },
  };
  return [band, curve];
}

// Draw a chart as its controls say. A curve that the reader has hidden stays hidden.
function draw(root, chart) {
  const [protocol, vertical, horizontal] = root.querySelectorAll("select");
  const panel = chart.panels[protocol.selectedIndex], isRelative = vertical.value === "relative", names = Object.keys(panel.points);
  const points = names.map((name) => (isRelative ? relative : (same) => same)(panel.points[name]));
  const places = [...new Set(points.flatMap((of) => column(of, 0)))].sort((a, b) => a - b);
  const ends = points.map((of) => of.at(-1)[1]), narrow = root.clientWidth < 700;
  const xaxis = { type: horizontal.value, title: { text: escape(panel.across) }, gridcolor: "#eee" };
  if (panel.log && places.length <= 12) Object.assign(xaxis, { tickvals: places, ticktext: places.map((x) => Math.round(x).toLocaleString("en")) });
  const yaxis = { type: vertical.value, title: { text: escape(chart.label) }, gridcolor: "#eee", zeroline: chart.zero };
  if (typeof ends[0] === "string") yaxis.type = "category";
  else if (isRelative) Object.assign(yaxis, { type: "linear", title: { text: "difference from the first value (%)" } });
  else if (chart.limits) yaxis.range = yaxis.type !== "log" ? chart.limits : chart.limits[0] > 0 ? chart.limits.map(Math.log10) : null;
  const [place, text] = panel.mark ?? [], inside = place >= places[0] && place <= places.at(-1);
  const line = { type: "line", x0: place, x1: place, yref: "paper", y0: 0, y1: 1, line: { dash: "dot", width: 1 } };
  const label = { x: horizontal.value === "log" ? Math.log10(place) : place, yref: "paper", y: 1, yanchor: "bottom", text, showarrow: false };
  const layout = {
    xaxis, yaxis, shapes: inside ? [line] : [], annotations: inside ? [label] : [], hovermode: "closest", uirevision: "keep",
    // high enough for the names of up to 40 strategies; on a phone they are below the axes
    height: Math.min(Math.max(480, 19 * names.length + 80), 860), margin: { l: 70, r: 10, t: 30, b: 50 },
    legend: { tracegroupgap: 0, ...(narrow ? { orientation: "h", y: -0.25 } : {}) },
    font: { family: "system-ui, sans-serif", size: 12 },
  };
  const image = { filename: chart.name || chart.title, scale: 2 };
  const options = { displaylogo: false, responsive: true, modeBarButtons: BUTTONS, toImageButtonOptions: image };
  // names are in the order of the right ends of the curves; 1000 is Plotly's default
  const ranks = ends.map((end) => 1000 + (chart.lines ? ends.filter((other) => other > end).length : 0));
  const opacity = 0.15 / Math.max(1, names.length / 6) ** 2; // many bands would cover each other
  Plotly.react(root.querySelector(".plot"), names.flatMap((name, i) => traces(name, points[i], chart.lines, opacity, ranks[i])), layout, options);
}

// Fill the controls of a chart, and draw it.
function show(root, chart) {
  const scales = [["linear", "linear"], ["log", "logarithmic"]], relative = ["relative", "relative to the first value"];
  const options = [chart.panels.map(({ name }) => [name, name]), chart.log ? [...scales, relative] : scales, scales];
  const values = [chart.panels[0].name, chart.log ? "log" : "linear", chart.panels[0].log ? "log" : "linear"];
  root.querySelectorAll("select").forEach((select, i) => {
    select.replaceChildren(...options[i].map(([value, label]) => new Option(label, value)));
    select.value = values[i];
    select.parentElement.hidden = options[i].length < 2;
    select.addEventListener("change", () => draw(root, chart));
  });
  draw(root, chart);
}

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

document.querySelectorAll("table").forEach((table) => table.tHead && sortable(table));

const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
const plotly = document.createElement("script");
plotly.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
document.head.append(plotly);
// A chart in a closed section is drawn when it is opened, because it has no width before.
document.querySelectorAll("details.chart").forEach((root, i) => {
  const open = () => root.open && !root.querySelector(".plot").data && show(root, DATA.charts[i]);
  root.addEventListener("toggle", open);
  open();
});
