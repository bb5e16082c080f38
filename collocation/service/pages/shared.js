// What both pages need from the document and the service. Text is only ever set as text, so nothing is markup.

export const by = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

export function made(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

export function drawn(tag, values = {}, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

export class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

const TOKEN = "vramcast-token";
export const token = () => sessionStorage.getItem(TOKEN) || "";

export async function call(path, body, signal) {
  const headers = {};
  if (body) headers["Content-Type"] = "application/json";
  if (token()) headers.Authorization = "Bearer " + token();
  let response;
  try { response = await fetch(path, {signal, headers, ...(body ? {method: "POST", body: JSON.stringify(body)} : {})}); }
  catch (error) { if (error.name === "AbortError") throw error; throw new Refused(0, "The service does not answer: is it running?"); }
  let reply = {};
  try { reply = await response.json(); } catch { /* the status says enough */ }
  if (response.status === 401) by("token-row").hidden = false;
  if (!response.ok) throw new Refused(response.status, reply.error || "The service answered with status " + response.status);
  return reply;
}

export function askToken(then) {
  by("token").value = token();
  by("token").addEventListener("change", () => { sessionStorage.setItem(TOKEN, by("token").value); then(); });
}

export function tell(problem) {
  by("problem").textContent = problem || "";
  by("problem").hidden = !problem;
}

export function row(cells, heading = true) {
  const line = made("tr");
  cells.forEach(([text, className], place) => {
    const cell = made(place === 0 && heading ? "th" : "td", text, className || "");
    if (place === 0 && heading) cell.scope = "row";
    line.append(cell);
  });
  return line;
}
