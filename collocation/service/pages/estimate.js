// The page of people: a form whose answer follows. The learned estimate comes first, then the simulation, and it says which.
import * as logic from "./logic.js";
import {askToken, by, call, drawn, made, row, tell} from "./shared.js";

const QUICK_PAUSE = 60, SIMULATION_PAUSE = 350, ADVICE_PAUSE = 250;
const WIDEST = 760, NARROWEST = 320, HEIGHT = 260, LEFT = 62;
const STALE = ["line", "legend", "cards", "changes"];
const FIELDS = Object.keys(logic.START);
const SLIDERS = [["batch", "batch_size", logic.BATCHES], ["length", "length", logic.LENGTHS], ["rank", "rank", logic.RANKS]];
let names = [], version = 0, aborting = new AbortController(), timers = [], shown = null;

const pause = (seconds, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, seconds);
  signal.addEventListener("abort", () => { clearTimeout(timer); reject(new DOMException("", "AbortError")); });
});

function form() {
  const values = {};
  for (const name of FIELDS) {
    const field = by(name), start = logic.START[name];
    values[name] = field.type === "checkbox" ? field.checked : typeof start === "number" ? Number(field.value) : field.value;
  }
  return values;
}

function fill(values) {
  for (const name of FIELDS) {
    const field = by(name);
    if (field.type === "checkbox") field.checked = values[name];
    else if (field.tagName !== "SELECT" || [...field.options].some((item) => item.value === String(values[name]))) field.value = values[name];
  }
  for (const [slider, field, steps] of SLIDERS) by(slider + "-slider").value = logic.placeOf(steps, Number(by(field).value) || 1);
}

// Show the fields that the network and the other fields leave open.
function arrange(values) {
  const trains = values.mode === "training", adapts = logic.takesLora(values.target);
  by("length-field").hidden = !logic.isText(values.target);
  by("side-field").hidden = !logic.isImage(values.target);
  by("training").hidden = !trains;
  by("lora-field").hidden = !adapts;
  by("lora-options").hidden = !values.lora;
  by("world-field").hidden = !values.parallel;
  by("strategies-section").hidden = !trains;
  by("compare").textContent = "Compare strategies on " + (values.parallel ? values.world_size : 8) + " GPUs";
}

// Ask again after a change of the form: what was asked before is given up.
async function update() {
  aborting.abort();
  aborting = new AbortController();
  const signal = aborting.signal, mine = ++version, values = form();
  arrange(values);
  if (!by("form").checkValidity() || !values.target) { tell("Give a network and a batch size of at least 1."); return; }
  const job = logic.jobOf(values), options = {device: values.device || undefined, risk: values.risk};
  history.replaceState(null, "", "?" + logic.queryOf(values));
  copies(job, values.device);
  tell("");
  waiting();
  try {
    if (logic.isFast(job)) {
      await pause(QUICK_PAUSE, signal);
      call("/v1/classify", {...job, ...options, fast: true}, signal).then((answer) => { if (mine === version && shown !== "simulated") show(answer); }).catch(() => {});
    }
    await pause(SIMULATION_PAUSE, signal);
    const answer = await call("/v1/classify", {...job, ...options}, signal);
    if (mine !== version) return;
    show(answer);
    await pause(ADVICE_PAUSE, signal);
    await advise({...job, ...options}, answer, signal);
  } catch (error) {
    if (error.name === "AbortError" || mine !== version) return;
    fail(error);
  }
}

// One after the other: the picture, the cards, and what to change.
async function advise(job, answer, signal) {
  const parts = [timeline, advice];
  for (const part of parts) {
    try { await part(job, answer, signal); }
    catch (error) {
      if (error.name === "AbortError") throw error;
      by(part === timeline ? "line-state" : "cards-state").textContent = error.message;
      for (const name of part === timeline ? ["line", "legend"] : ["cards"]) by(name).replaceChildren();
      if (part === advice) by("changes-section").hidden = true;
    }
  }
}

function waiting() {
  shown = null;
  badge("Simulating…", true);
  for (const [name, words] of [["line-state", "Shown with the simulation."], ["cards-state", "Shown with the simulation."]]) { by(name).textContent = words; by(name).hidden = false; }
  for (const name of STALE) by(name).classList.add("stale");
  by("strategies-table").hidden = true;
  by("strategies-state").textContent = "Each strategy is simulated, which takes some seconds.";
  by("answer").setAttribute("aria-busy", "true");
}

// Parts of the job before are dimmed until they are drawn again, and dropped where that fails.
function fresh(...parts) { for (const name of parts) by(name).classList.remove("stale"); }

function fail(error) {
  tell(error.message);
  badge("No answer", false);
  by("verdict").textContent = "No answer"; by("verdict").className = "";
  by("summary").textContent = "";
  for (const name of ["gauge", "scale", "figures", "line", "legend", "cards"]) by(name).replaceChildren();
  for (const name of ["notes", "changes-section"]) by(name).hidden = true;
  by("answer").setAttribute("aria-busy", "false");
}

function badge(text, busy) {
  by("source").textContent = text;
  by("source").className = busy ? "badge busy" : "badge";
}

function show(answer) {
  const simulated = answer.reserved_mib !== null, verdict = logic.verdictOf(answer);
  shown = simulated ? "simulated" : "learned";
  badge(logic.sourceOf(answer) + (simulated ? "" : "; simulating…"), !simulated);
  by("verdict").textContent = logic.verdictWords(verdict);
  by("verdict").className = logic.colourOf(verdict);
  by("summary").textContent = logic.sentenceOf(answer);
  gauge(answer);
  const figures = [["Estimate", logic.gib(answer.estimate_mib)],
    [answer.observed ? "Reserve (seen before)" : "Reserve", logic.gib(answer.need_mib)], ["Card has", logic.gib(answer.capacity_mib)],
    ["Chance of not fitting", logic.share(answer.oom_probability)]];
  if (answer.max_batch_size != null) figures.push(["Largest batch", answer.max_batch_size || "none"]);
  pairs(figures);
  const notes = [...answer.notes];
  if (answer.out_of_distribution) notes.unshift("This job is unlike those that the estimator was trained on: the figure is the simulation's.");
  by("notes").replaceChildren(...notes.map((note) => made("li", note)));
  by("notes").hidden = !notes.length;
  if (simulated) by("answer").setAttribute("aria-busy", "false");
}

function pairs(figures) {
  by("figures").replaceChildren(...figures.map(([name, value]) => {
    const pair = made("div"); pair.append(made("dt", name), made("dd", value)); return pair; }));
}

// The breakdown at the peak on a scale that ends at the card's memory, or at the need where that is more.
function gauge(answer) {
  const parts = logic.PARTS.filter((name) => answer.breakdown_mib[name] > 0).map((name) => [name, answer.breakdown_mib[name]]);
  const top = Math.max(answer.capacity_mib, answer.estimate_mib) * 1.0;
  const bars = (parts.length ? parts : [["activations", answer.estimate_mib]]).map(([name, size]) => {
    const bar = made("div", "", name); bar.style.width = 100 * size / top + "%"; return bar; });
  const limit = made("span", "", "limit");
  limit.style.left = "calc(" + Math.min(100, 100 * answer.capacity_mib / top) + "% - 2px)";
  by("gauge").replaceChildren(...bars, limit);
  by("scale").replaceChildren(made("span", "0"), made("span", answer.estimate_mib > answer.capacity_mib ? "needed: " + logic.gib(top) : "card: " + logic.gib(top)));
}

async function timeline(job, answer, signal) {
  by("line-state").textContent = "Drawing…";
  const {device, risk, ...rest} = job;
  const line = await call("/v1/timeline", {job: {...rest, device}}, signal);
  by("line").replaceChildren(picture(line, answer));
  fresh("line", "legend");
  const uses = Object.entries(answer.breakdown_mib).filter(([, size]) => size >= 0.5).sort((a, b) => b[1] - a[1]);
  by("legend").replaceChildren(...uses.map(([name, size]) => {
    const item = made("li"); item.append(made("span", "", "swatch " + name), made("span", logic.partName(name)), made("b", logic.gib(size))); return item; }));
  by("line-state").textContent = "The first steps, from left to right, in the order of allocations. The line is what torch reserves; the figures are those at the peak.";
}

function picture(line, answer) {
  const width = Math.max(NARROWEST, Math.min(WIDEST, by("line").clientWidth));
  const stack = logic.stackOf(line, width - LEFT, HEIGHT - 10);
  const label = "Memory over the steps: the peak is " + logic.gib(stack.peak / 2 ** 20) + ". The largest part at the peak: " +
    Object.entries(answer.breakdown_mib).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([name, size]) => logic.partName(name) + " " + logic.gib(size)).join(", ") + ".";
  const svg = drawn("svg", {viewBox: "0 0 " + width + " " + HEIGHT, class: "picture", role: "img", "aria-label": label});
  const box = drawn("g", {transform: "translate(" + LEFT + " 8)"});
  for (const mark of stack.marks) {
    box.append(drawn("line", {x1: 0, x2: width - LEFT, y1: mark.y, y2: mark.y, class: "grid"}));
    svg.append(drawn("text", {x: LEFT - 8, y: mark.y + 12, "text-anchor": "end"}, logic.gib(mark.bytes / 2 ** 20)));
  }
  for (const area of stack.areas) {
    const path = drawn("path", {d: area.path, class: area.name});
    path.append(drawn("title", {}, logic.partName(area.name) + ": " + logic.gib(area.most / 2 ** 20) + " at most"));
    box.append(path);
  }
  box.append(drawn("path", {d: stack.reserved, class: "reserved"}));
  if (stack.limit !== null) {
    box.append(drawn("line", {x1: 0, x2: width - LEFT, y1: stack.limit, y2: stack.limit, class: "limit"}));
    box.append(drawn("text", {x: width - LEFT - 4, y: stack.limit - 6, "text-anchor": "end", class: "name"}, "the card's memory"));
  }
  svg.append(box);
  return svg;
}

async function advice(job, answer, signal) {
  if (job.parallel) return cardsOf(job, signal);
  by("cards-state").textContent = "Comparing cards, and searching the largest batch…";
  const reply = await call("/v1/advice", {job}, signal);
  show({...answer, max_batch_size: reply.max_batch_size});
  cards(reply.devices, answer.device);
  by("changes").replaceChildren(...reply.changes.map(changeRow));
  by("changes-section").hidden = !reply.changes.length;
}

function changeRow(item) {
  const {words, flags} = logic.partsOfChange(item.change), line = outcome([[words]], item);
  if (flags) line.firstChild.append(made("code", flags));
  return line;
}

// Several ranks are simulated slowly: the strategies are compared on request.
async function cardsOf(job, signal) {
  by("changes-section").hidden = true;
  by("cards-state").textContent = "Comparing cards…";
  const gpus = [...by("device").options].map((item) => ({id: item.value, device: item.value, free_mib: 2 ** 20, total_mib: 2 ** 20}));
  const {device, risk, ...rest} = job;
  const reply = await call("/v1/placements", {job: {...rest, risk}, gpus}, signal);
  cards(Object.values(reply.answers).sort((a, b) => a.capacity_mib - b.capacity_mib), device);
}

function outcome(first, item) {
  const verdict = logic.verdictOf(item);
  return row([...first, [logic.gib(item.estimate_mib), "number wide"], [logic.gib(item.safe_mib), "number"], [verdict, "state " + logic.colourOf(verdict)]]);
}

function cards(answers, chosen) {
  fresh("cards", "changes");
  by("cards").replaceChildren(...answers.map((item) => {
    const verdict = logic.verdictOf(item), card = made("li", "", item.device === chosen ? "chosen" : "");
    const meter = made("div", "", "meter " + logic.colourOf(verdict)), bar = made("div");
    bar.style.width = Math.min(100, 100 * item.need_mib / item.capacity_mib) + "%";
    meter.append(bar);
    card.append(made("b", logic.titleOf(item.profile)), meter, made("span", verdict, "state " + logic.colourOf(verdict)), made("br"),
      made("small", logic.gib(item.need_mib) + " of " + logic.gib(item.capacity_mib)));
    return card;
  }));
  const fitting = answers.filter((item) => logic.verdictOf(item) === "fits");
  by("cards-state").textContent = fitting.length ? "Fits " + fitting.length + " of " + answers.length + " cards. The smallest is the " + logic.titleOf(fitting[0].profile) + "." : "Fits none of " + answers.length + " cards.";
}

async function compare() {
  const values = form(), mine = version;
  const job = logic.jobOf({...values, parallel: values.parallel || "ddp", world_size: values.parallel ? values.world_size : 8});
  by("compare").disabled = true;
  by("strategies-state").textContent = "Simulating each strategy…";
  try {
    const reply = await call("/v1/advice", {job: {...job, device: values.device || undefined, risk: values.risk}}, aborting.signal);
    if (mine !== version) return;
    by("strategies").replaceChildren(...reply.strategies.map((item) => {
      const line = outcome([[item.smallest ? "Fewest GPUs: " + item.strategy : item.strategy], [item.world_size, "number"]], item);
      return line; }));
    by("strategies-table").hidden = !reply.strategies.length;
    by("strategies-state").textContent = reply.strategies.length ? "For one of the GPUs, each with a batch of " + values.batch_size + "." : "None of the strategies can be simulated for this network.";
  } catch (error) {
    by("strategies-state").textContent = error.name === "AbortError" ? "The job changed: compare again." : error.message;
  } finally { by("compare").disabled = false; }
}

function copies(job, device) {
  const texts = [["Command", logic.commandOf(job, device)], ["Kubernetes: metadata of a pod", logic.yamlOf(job)], ["Slurm: the head of a job script", logic.sbatchOf(job)],
    ["Request: the body of POST /v1/classify", JSON.stringify({...job, ...(device ? {device} : {})})], ["Link to this page", location.href]];
  by("copies").replaceChildren(...texts.map(([title, text]) => {
    const block = made("div"), head = made("div", "", "head"), button = made("button", "Copy"), done = made("span", "", "unseen");
    button.type = "button";
    button.setAttribute("aria-label", "Copy: " + title);
    done.setAttribute("role", "status");
    button.addEventListener("click", () => copy(text, button, done));
    head.append(made("span", title, "label"), button);
    block.append(head, made("pre", text), done);
    return block;
  }));
}

async function copy(text, button, done) {
  try { await navigator.clipboard.writeText(text); }
  catch { const area = made("textarea"); area.value = text; document.body.append(area); area.select(); document.execCommand("copy"); area.remove(); }
  button.textContent = "Copied"; done.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; done.textContent = ""; }, 1500);
}

// A combobox after the pattern of the ARIA authoring practices: the list follows the text, and focus stays in the field.
function combobox() {
  const field = by("target"), list = by("options");
  let at = -1;
  const items = () => [...list.children];
  const close = () => { list.hidden = true; field.setAttribute("aria-expanded", "false"); field.removeAttribute("aria-activedescendant"); at = -1; };
  const mark = (place) => {
    at = place;
    items().forEach((item, index) => item.setAttribute("aria-selected", String(index === place)));
    field.setAttribute("aria-activedescendant", items()[place].id);
    items()[place].scrollIntoView({block: "nearest"});
  };
  const choose = (name) => { field.value = name; close(); field.dispatchEvent(new Event("change", {bubbles: true})); };
  const open = (query) => {
    const found = logic.matches(names, query);
    list.replaceChildren(...found.map((name, index) => {
      const item = made("li", name.slice(name.indexOf(":") + 1)); item.append(made("span", name.split(":")[0]));
      item.id = "option-" + index; item.setAttribute("role", "option"); item.setAttribute("aria-selected", "false");
      item.addEventListener("mousedown", (event) => { event.preventDefault(); choose(name); });
      item.dataset.name = name;
      return item; }));
    list.hidden = !found.length;
    field.setAttribute("aria-expanded", String(found.length > 0));
    at = -1;
  };
  field.addEventListener("focus", () => field.select());
  field.addEventListener("click", () => { if (list.hidden) open(""); });
  field.addEventListener("input", () => open(field.value));
  field.addEventListener("blur", close);
  field.addEventListener("keydown", (event) => {
    const count = items().length;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (list.hidden) { open(""); return; }
      if (count) mark((at + (event.key === "ArrowDown" ? 1 : at < 0 ? 0 : -1) + count) % count);
    } else if (event.key === "Enter") {
      event.preventDefault();
      if (!list.hidden && at >= 0) choose(items()[at].dataset.name);
      else { close(); update(); }
    } else if (event.key === "Escape") close();
  });
}

function listen() {
  for (const [slider, field, steps] of SLIDERS) {
    const range = by(slider + "-slider");
    range.min = 0; range.max = steps.length - 1; range.step = 1;
    range.addEventListener("input", () => { by(field).value = steps[range.value]; update(); });
    by(field).addEventListener("input", () => { range.value = logic.placeOf(steps, Number(by(field).value) || 1); });
  }
  by("form").addEventListener("input", (event) => { if (event.target.id !== "target" && event.target.id !== "own" && event.target.type !== "range") update(); });
  by("target").addEventListener("change", update);
  by("form").addEventListener("submit", (event) => { event.preventDefault(); update(); });
  by("compare").addEventListener("click", compare);
  by("ask").addEventListener("click", askOwn);
  window.addEventListener("popstate", () => { fill(logic.formOf(location.search)); update(); });
}

// A job as JSON: one answer, without the parts that need a name.
async function askOwn() {
  aborting.abort();
  aborting = new AbortController();
  version++;
  tell(""); waiting();
  try {
    const text = by("own").value.trim();
    let job = text.startsWith("{") ? JSON.parse(text) : {name: text};
    if ("family" in job) job = {spec: job};
    const values = form(), asked = {...job, device: values.device || undefined, risk: values.risk};
    const answer = await call("/v1/classify", asked, aborting.signal);
    show(answer);
    by("answer").setAttribute("aria-busy", "false");
    badge(logic.sourceOf(answer) + ", from JSON", false);
    if (job.spec || job.name || job.target) await advise(asked, answer, aborting.signal);
    else for (const name of STALE) by(name).replaceChildren(); // nothing of it is simulated here
  } catch (error) {
    if (error.name !== "AbortError") fail(error instanceof SyntaxError ? new Error("Expected JSON, found: " + error.message) : error);
  }
}

async function start() {
  try {
    const listed = await call("/v1/devices");
    by("device").replaceChildren(...listed.devices.filter((item) => !item.title.includes(",")).map((item) =>
      new Option(logic.titleOf(item.title) + (item.calibrated ? "" : " (not calibrated)"), item.name, false, item.name === listed.default)));
    fill({...logic.formOf(location.search), device: logic.formOf(location.search).device || listed.default});
    update();
    const networks = await call("/v1/networks");
    names = Object.entries(networks.targets).flatMap(([library, listedNames]) => listedNames.map((name) => library + ":" + name));
  } catch (error) { fail(error); }
}

by("side").replaceChildren(new Option("the network's own", "0"), ...logic.SIDES.map((side) => new Option(side + " x " + side, side)));
listen();
combobox();
fill(logic.formOf(location.search));
arrange(form());
askToken(start);
start();
