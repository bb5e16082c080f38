// The page of operators: the queue, and what jobs took against their forecasts.
import * as logic from "./logic.js";
import {askToken, by, call, drawn, made, row, tell} from "./shared.js";

const PAUSE = 5000, SIDE = 300, LEFT = 64;
let paused = false;

function tiles(figures) {
  const rows = [["Status", figures.status], ["Networks in the queue", figures.queue.traces], ["Searches", figures.queue.searches], ["Bodies in the queue", figures.queue.bodies],
    ["Requests now", figures.queue.requests], ["Observed jobs", figures.observed_jobs], ["Forecast too low", figures.too_low + " of " + figures.forecast_runs]];
  by("tiles").replaceChildren(...rows.map(([name, value]) => { const tile = made("div"); tile.append(made("dt", name), made("dd", value)); return tile; }));
}

function scatter(runs) {
  const known = runs.filter((run) => run.safe_mib);
  by("scatter-state").textContent = known.length ? "Each point is a run. Above the line it took more than was reserved by the forecast." : "No run of a job with a forecast was observed yet.";
  if (!known.length) { by("scatter").replaceChildren(); return; }
  const plot = logic.scatterOf(runs, SIDE);
  const label = known.length + " runs, of which " + plot.points.filter((point) => point.low).length + " took more than their forecast reserved.";
  const svg = drawn("svg", {viewBox: "0 0 " + (SIDE + LEFT + 12) + " " + (SIDE + 52), class: "picture", role: "img", "aria-label": label});
  const box = drawn("g", {transform: "translate(" + LEFT + " 8)"});
  for (const mark of plot.marks) {
    box.append(drawn("line", {x1: mark.at, x2: mark.at, y1: 0, y2: SIDE, class: "grid"}), drawn("line", {x1: 0, x2: SIDE, y1: SIDE - mark.at, y2: SIDE - mark.at, class: "grid"}));
    box.append(drawn("text", {x: mark.at, y: SIDE + 18, "text-anchor": "middle"}, String(mark.mib / 1024)), drawn("text", {x: -8, y: SIDE - mark.at + 4, "text-anchor": "end"}, logic.gib(mark.mib)));
  }
  box.append(drawn("line", {x1: 0, y1: SIDE, x2: SIDE, y2: 0, class: "even"}));
  for (const point of plot.points) {
    const dot = drawn("circle", {cx: point.x, cy: point.y, r: 4, class: point.low ? "workspace" : "parameters"});
    dot.append(drawn("title", {}, point.run.target + ": reserved " + logic.gib(point.run.safe_mib) + ", took " + logic.gib(point.run.peak_mib)));
    box.append(dot);
  }
  box.append(drawn("text", {x: SIDE / 2, y: SIDE + 38, "text-anchor": "middle"}, "reserved by the forecast, GiB"));
  svg.append(box);
  by("scatter").replaceChildren(svg);
}

const size = (mib) => mib ? logic.gib(mib) : "none";

function groups(id, items) {
  by(id).replaceChildren(...items.map((item) => row([[item.name], [item.runs, "number"], [item.too_low, "number" + (item.too_low ? " not" : "")], [logic.gib(item.peak_mib), "number"],
    [item.used_share === null ? "" : Math.round(100 * item.used_share) + " %", "number"]])));
}

function show(figures) {
  tiles(figures);
  by("since").textContent = new Date(figures.since).toLocaleString();
  scatter(figures.runs);
  const low = figures.runs.filter((run) => run.safe_mib && run.peak_mib > run.safe_mib);
  by("low-state").hidden = low.length > 0;
  by("low-table").hidden = !low.length;
  by("low").replaceChildren(...low.slice(0, 30).map((run) => row([[run.target], [run.user || ""], [run.device], [logic.gib(run.safe_mib), "number"], [logic.gib(run.peak_mib), "number not"]])));
  by("recent").replaceChildren(...figures.runs.slice(0, 30).map((run) => row([[run.target], [run.user || ""], [run.device], [size(run.safe_mib), "number"],
    [logic.gib(run.peak_mib), "number"], [new Date(run.at).toLocaleTimeString()]])));
  groups("users", figures.users);
  groups("networks", figures.networks);
}

async function refresh() {
  if (paused) return;
  try { show(await call("/v1/operations")); tell(""); }
  catch (error) { tell(error.message); }
}

by("pause").addEventListener("click", () => {
  paused = !paused;
  by("pause").textContent = paused ? "Resume" : "Pause";
  by("pause").setAttribute("aria-pressed", String(paused));
  refresh();
});
askToken(refresh);
refresh();
setInterval(() => { if (!document.hidden) refresh(); }, PAUSE);
