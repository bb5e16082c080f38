// Pure functions of the pages: no document, no network. Tested by tests/test_page_logic.py with node.

export const BATCHES = steps(1, 4096);
export const LENGTHS = steps(64, 131072);
export const RANKS = [1, 2, 4, 8, 16, 32, 64, 128, 256];
export const SIDES = [64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512, 640, 768, 1024];
export const PARTS = ["context", "parameters", "optimizer_state", "gradients", "inputs", "activations", "workspace", "temporaries", "allocator_cache"];
const WORDS = {context: "CUDA context", optimizer_state: "optimizer state", workspace: "library workspaces", allocator_cache: "allocator cache"};
export const START = {target: "timm:resnet50", batch_size: 32, length: 512, side: 0, precision: "fp32", optimizer: "adamw", checkpointing: false,
  lora: false, rank: 16, quantize: "", mode: "training", parallel: "", world_size: 8, device: "", risk: 0.01};
export const PRECISIONS = {fp32: {}, autocast_bf16: {autocast: "bf16"}, autocast_fp16: {autocast: "fp16"}, bf16: {dtype: "bf16"}};
const POPULAR = ["timm:resnet50", "timm:vit_base_patch16_224", "timm:convnext_base", "timm:efficientnet_b0", "hf:gpt2", "hf:bert-base",
  "hf:llama-3.2-1b", "hf:llama-3-8b", "hf:qwen3-8b", "hf:mistral-7b"];

function steps(least, most) {
  const values = [];
  for (let power = least; power <= most; power *= 2) { values.push(power); if (power > 1 && power * 1.5 <= most) values.push(power * 1.5); }
  return values;
}

// The place of the step that is nearest to a value, on a slider whose steps grow.
export function placeOf(values, value) {
  let best = 0;
  values.forEach((item, place) => { if (Math.abs(Math.log(item / value)) < Math.abs(Math.log(values[best] / value))) best = place; });
  return best;
}

export const isText = (target) => target.startsWith("hf:") && !/^hf:(vit|whisper)/.test(target);
export const isImage = (target) => /^(timm|torchvision):/.test(target);
export const takesLora = (target) => target.startsWith("hf:");

// The form as the body of a request: the keys of a line of `vramcast classify --jobs`.
export function jobOf(form) {
  const job = {target: form.target.trim(), batch_size: Number(form.batch_size), ...PRECISIONS[form.precision]};
  if (isText(job.target)) job.length = Number(form.length);
  if (isImage(job.target) && form.side) job.input = "3," + form.side + "," + form.side;
  if (form.mode !== "training") job.mode = form.mode;
  else {
    job.optimizer = form.optimizer;
    if (form.checkpointing) job.checkpointing = true;
    if (form.lora && takesLora(job.target)) {
      job.lora = "r=" + form.rank + ",targets=all-linear";
      if (form.quantize) job.quantize = form.quantize;
    }
    if (form.parallel) { job.parallel = form.parallel; job.world_size = Number(form.world_size); }
  }
  return job;
}

// Layers alone say nothing about ranks, or a network that is not trained.
export const isFast = (job) => !job.parallel && !job.mode && job.optimizer !== "adamw8bit";

const quoted = (text) => /^[\w@%+=:,./-]+$/.test(text) ? text : "'" + text.replaceAll("'", "'\\''") + "'";

export function commandOf(job, device) {
  const words = ["vramcast", "classify", quoted(job.target)];
  for (const [name, value] of Object.entries({...job, ...(device ? {device} : {})})) {
    if (name === "target") continue;
    words.push("--" + name.replaceAll("_", "-"));
    if (value !== true) words.push(quoted(String(value)));
  }
  return words.join(" ");
}

// The job as text, which Slurm's plugins and the webhook accept.
export function textOf(job) {
  const words = Object.entries(job).filter(([name]) => name !== "target").map(([name, value]) => value === true ? name : name + "=" + quoted(String(value)));
  return [job.target, ...words].join(" ");
}

export function yamlOf(job) {
  const text = textOf(job).replaceAll("\\", "\\\\").replaceAll('"', '\\"');
  return ["metadata:", "  labels:", '    vramcast: "yes"', "  annotations:", '    vramcast/job: "' + text + '"'].join("\n");
}

export const sbatchOf = (job) => "#!/bin/bash\n#VRAMCAST " + textOf(job);

// The form in the query of a link, without what is as at the start.
export function queryOf(form) {
  const query = new URLSearchParams();
  for (const [name, start] of Object.entries(START)) if (name === "target" || String(form[name]) !== String(start)) query.set(name, form[name]);
  return query.toString();
}

export function formOf(query) {
  const form = {...START};
  for (const [name, text] of new URLSearchParams(query)) {
    if (!Object.hasOwn(START, name) || text.length > 200) continue;
    const start = START[name];
    if (typeof start === "boolean") form[name] = text === "true";
    else if (typeof start === "number") { if (Number.isFinite(Number(text)) && Number(text) >= 0 && text !== "") form[name] = Number(text); }
    else form[name] = text;
  }
  return form;
}

// Names that contain all words of a query: those that begin with it first.
export function matches(names, query, most = 40) {
  const words = query.toLowerCase().split(/[\s:]+/).filter(Boolean);
  if (!words.length) return POPULAR.filter((name) => names.includes(name)).slice(0, most);
  const rank = (name) => { const bare = name.slice(name.indexOf(":") + 1); return (name === query ? 0 : bare.startsWith(words.at(-1)) ? 1 : 2); };
  return names.filter((name) => words.every((word) => name.toLowerCase().includes(word)))
    .sort((a, b) => rank(a) - rank(b) || a.length - b.length || (a < b ? -1 : 1)).slice(0, most);
}

export const gib = (mib) => mib >= 1024 ? (mib / 1024).toFixed(mib >= 102400 ? 0 : 1) + " GiB" : mib.toFixed(mib < 9.95 ? 1 : 0) + " MiB";
export const share = (p) => p >= 0.9995 ? "> 99.9 %" : p < 0.0005 ? "< 0.1 %" : Number((100 * p).toPrecision(2)) + " %";
export const partName = (name) => WORDS[name] || name.replaceAll("_", " ");
export const colourOf = (verdict) => verdict === "does not fit" ? "not" : verdict;
export const titleOf = (profile) => profile.split(",")[0].replace("NVIDIA ", "").replace("GeForce ", "");
// A job that ran on a device fits there, whatever the forecast says.
export const verdictOf = (answer) => answer.basis === "observed" ? "fits" : answer.verdict;
export const verdictWords = (verdict) => ({"fits": "It fits", "tight": "It may fit", "does not fit": "It does not fit"})[verdict];

// 'a batch of 8 (--batch-size 8)' in two parts.
export function partsOfChange(change) {
  const parts = /^(.*) \((--.*)\)$/.exec(change);
  return parts ? {words: parts[1], flags: parts[2]} : {words: change, flags: ""};
}

export function sentenceOf(answer) {
  const card = titleOf(answer.profile), bucket = answer.bucket;
  if (bucket.upper_mib === null) return "It needs about " + gib(answer.estimate_mib) + "; the " + card + " has " + gib(answer.capacity_mib) + ".";
  return "It needs about " + gib(answer.estimate_mib) + " of the " + card + "'s " + gib(answer.capacity_mib) + "; reserve " + gib(answer.need_mib) + ".";
}

export function sourceOf(answer) {
  if (answer.reserved_mib === null) return "Learned estimate from the layers";
  return answer.parallel ? "Simulated, one of " + answer.parallel : "Simulated";
}

const PLACES = 240;
// Stacked areas of memory over a step, as paths in a box of width by height; the highest of neighbours stands for them.
export function stackOf(line, width, height) {
  const count = line.reserved_bytes.length, places = Math.min(count, PLACES);
  const picked = Array.from({length: places}, (_, place) => {
    const start = Math.floor(place * count / places), end = Math.max(start + 1, Math.floor((place + 1) * count / places));
    let best = start;
    for (let at = start; at < end; at++) if (total(line, at) > total(line, best)) best = at;
    return best;
  });
  const peak = Math.max(...picked.map((at) => Math.max(line.reserved_bytes[at] + line.context_bytes, total(line, at))));
  const top = line.capacity_bytes <= 2 * peak ? Math.max(peak, line.capacity_bytes) * 1.04 : peak * 1.1;
  const x = (place) => round(width * place / Math.max(1, places - 1)), y = (bytes) => round(height - height * bytes / top);
  let below = picked.map(() => 0);
  const areas = [["context", picked.map(() => line.context_bytes)], ...Object.entries(line.uses).map(([name, values]) => [name, picked.map((at) => values[at])])]
    .map(([name, values]) => {
      const above = below.map((bytes, place) => bytes + values[place]);
      const path = "M" + above.map((bytes, place) => x(place) + " " + y(bytes)).join("L") + "L" + below.map((bytes, place) => x(place) + " " + y(bytes)).reverse().join("L") + "Z";
      below = above;
      return {name, path, most: Math.max(...values)};
    });
  const reserved = "M" + picked.map((at, place) => x(place) + " " + y(line.reserved_bytes[at] + line.context_bytes)).join("L");
  return {areas, reserved, limit: line.capacity_bytes <= top ? y(line.capacity_bytes) : null, marks: marksOf(top).map((bytes) => ({bytes, y: y(bytes)})), peak};
}

const total = (line, at) => line.context_bytes + Object.values(line.uses).reduce((sum, values) => sum + values[at], 0);
const round = (value) => Math.round(10 * value) / 10;

// Three to six round amounts below a top, in bytes.
export function marksOf(top) {
  let step = 2 ** Math.floor(Math.log2(top / 3));
  const marks = [];
  for (let at = step; at <= top; at += step) marks.push(at);
  return marks;
}

// Forecasts and observations on logarithmic axes, in a square.
export function scatterOf(runs, side) {
  const known = runs.filter((run) => run.safe_mib);
  const values = known.flatMap((run) => [run.safe_mib, run.peak_mib]);
  const low = Math.min(...values, 512) / 1.3, high = Math.max(...values, 2048) * 1.3;
  const at = (mib) => side * Math.log(mib / low) / Math.log(high / low);
  return {points: known.map((run) => ({run, x: round(at(run.safe_mib)), y: round(side - at(run.peak_mib)), low: run.peak_mib > run.safe_mib})),
    marks: [1, 2, 4, 8, 16, 32, 64, 128].map((size) => 1024 * size).filter((mib) => mib > low && mib < high).map((mib) => ({mib, at: round(at(mib))}))};
}
