// Keeps the page up to date, draws the charts and copies flags; the page is complete without it.
// Data from the server becomes text and attributes of a parsed document, never HTML from strings.

const SPAN = 600;
const SPANS = [60, 120, 300, SPAN];
const HEIGHT = 104;
const LEFT = 38;
const RIGHT = 6;
const FOOT = 17;
const SVG = "http://www.w3.org/2000/svg";
const PATIENCE = 5000;
const FRESH = 10000; // milliseconds after which data is old, unless the server asks for longer pauses
const HIDDEN = 30000; // pause of a hidden tab, whose title is still read

const percent = (value) => `${(100 * value).toFixed(value < 0.0995 && value > 0 ? 1 : 0)}%`;
function plain(value) {
  const short = +value.toPrecision(value < 100 ? 2 : value < 10000 ? 4 : 3);
  if (short < 10000) return `${short}`;
  const [unit, sign] = short < 1e6 ? [1e3, "k"] : short < 1e9 ? [1e6, "M"] : [1e9, "G"];
  return `${short / unit}${sign}`;
}

// Titles, short names and units of the signals come from the server. A curve's form sets it apart without colour.
const main = document.getElementById("main");
const WORDS = JSON.parse(main.dataset.words);
const CHARTS = [
  { most: 1, curves: [
    { signal: "kv_usage_ratio", colour: "blue", form: "filled" },
    { signal: "kv_usage_max_ratio", colour: "grey", form: "thin" },
  ] },
  { least: 1, curves: [
    { signal: "preemptions_per_second", colour: "red", form: "filled" },
    { signal: "preemptions_inferred_per_second", colour: "amber", form: "dots" },
  ] },
  { title: "Requests", least: 4, limit: "seats", curves: [
    { signal: "requests_running", colour: "blue", form: "line" },
    { signal: "requests_waiting", colour: "amber", form: "dash" },
  ] },
  { least: 10, curves: [
    { signal: "generation_tokens_per_second", colour: "green", form: "filled" },
    { signal: "generation_tokens_per_second_recent", colour: "grey", form: "thin" },
  ] },
];
for (const chart of CHARTS) {
  const [title, first, unit] = WORDS[chart.curves[0].signal];
  chart.title ??= title;
  chart.show = unit === "ratio" ? percent : plain;
  for (const curve of chart.curves) {
    curve.name = WORDS[curve.signal][1];
    curve.legend = curve.name.replace(first, "").trim() || curve.name; // "KV usage" and "peak"
  }
}

function words(name) {
  const text = name.replaceAll("_", " ").replace(/\b(kv|dp)\b/g, (short) => short.toUpperCase());
  return text[0].toUpperCase() + text.slice(1);
}

const pasts = new Map(); // target and engine -> columns of the last ten minutes
const drawn = new WeakMap(); // place -> state of its charts
let clock = { now: [], wall: 0 };

// Parts of documents.

function svg(name, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
}

function html(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

function say(id, text) {
  const place = document.getElementById(id);
  if (place.textContent !== text) place.textContent = text;
}

// Make one element equal to another and keep equal parts: focus, selection and open details survive.
function morph(old, fresh) {
  for (const { name, value } of fresh.attributes)
    if (old.getAttribute(name) !== value && !(name === "open" && old.localName === "details")) old.setAttribute(name, value);
  if ("drawn" in fresh.dataset) return; // this script fills it and sets more attributes than the server
  for (const { name } of [...old.attributes])
    if (!fresh.hasAttribute(name) && !(name === "open" && old.localName === "details")) old.removeAttribute(name);
  const named = new Map([...old.children].filter((child) => child.id).map((child) => [child.id, child]));
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const match = child.id ? named.get(child.id) : at;
    if (!match || match.nodeName !== child.nodeName || (match.id || "") !== (child.id || "")) {
      old.insertBefore(document.importNode(child, true), at);
      continue;
    }
    if (match === at) at = at.nextSibling;
    else old.insertBefore(match, at);
    if (child.nodeType !== Node.ELEMENT_NODE) {
      if (match.data !== child.data) match.data = child.data;
    } else if (match instanceof HTMLElement) morph(match, child);
    else if (!match.isEqualNode(child)) match.replaceWith(document.importNode(child, true));
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

// Updates.

function ask(url, type) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("GET", url);
    request.responseType = type;
    request.timeout = PATIENCE;
    request.onload = () => (request.status === 200 && request.response ? resolve(request.response) : reject());
    request.onerror = request.ontimeout = reject;
    request.send();
  });
}

let updatedAt = Date.now();
let headline = document.title;
let marking = 0;

const pause = () => (document.hidden ? HIDDEN : 1000 * Number(main.dataset.every || 2));

// Until the next answer: say that the page is old, and how old. The sentence that is read aloud does not change.
function mark() {
  document.body.classList.add("lost");
  document.title = headline.startsWith("Old: ") ? headline : `Old: ${headline}`;
  say("since", `Last updated ${ago((Date.now() - updatedAt) / 1000)}.`);
  marking ||= setInterval(mark, 1000);
}

function unmark() {
  clearInterval(marking);
  marking = 0;
  document.body.classList.remove("lost");
  say("lost", "");
}

async function refresh() {
  try {
    const page = await ask(location.pathname + location.search, "document");
    const fresh = page.getElementById("main");
    if (!fresh || !page.body.dataset.run) throw new Error("not this page");
    if (page.body.dataset.run !== document.body.dataset.run) {
      location.reload(); // another exporter: no more turns here, each would start the reload again
      return new Promise(() => {});
    }
    const news = fresh.dataset.headline;
    if (news !== main.dataset.headline) say("said", news);
    document.title = headline = page.title;
    say("asof", page.getElementById("asof").textContent);
    document.querySelector(".skip").hash = page.querySelector(".skip").hash;
    morph(main, fresh);
    updatedAt = Date.now();
    unmark();
    await update();
  } catch {
    mark();
    say("lost", "Old: the exporter does not respond.");
  }
  return undefined;
}

let waiting = 0;
let busy = true; // until the page is drawn as it came

async function turn() {
  clearTimeout(waiting);
  if (!document.hidden && Date.now() - updatedAt > Math.max(FRESH, 2 * pause())) mark(); // the computer slept
  if (busy) return;
  busy = true;
  await refresh();
  busy = false;
  waiting = setTimeout(turn, pause());
}

// The past.

const keyOf = (place) => `${place.dataset.url} ${place.dataset.engine}`;

// Append the newest points; returns false where points are missing in between.
function append(key, tail) {
  const past = pasts.get(key);
  const first = tail.t[0];
  if (!past || past.t.length === 0 || first === undefined) {
    if (!past) pasts.set(key, tail);
    else Object.assign(past, { verdicts: tail.verdicts, restarts: tail.restarts });
    return Boolean(past);
  }
  const whole = past.t.at(-1) >= first;
  let keep = past.t.length;
  while (keep > 0 && past.t[keep - 1] >= first) keep -= 1;
  const start = past.t.findIndex((t) => t >= tail.t.at(-1) - SPAN);
  for (const [name, values] of Object.entries(tail))
    past[name] = name === "verdicts" || name === "restarts" ? values : past[name].slice(start, keep).concat(values);
  return whole;
}

// Fetch the history of the engines that the page shows; returns their keys.
async function fetchPast() {
  const history = await ask(`api/v1/history${location.search}`, "json");
  const pairs = history.targets.flatMap(({ url, engines }) =>
    Object.entries(engines).map(([name, past]) => [`${url} ${name}`, past]));
  for (const [key, past] of pairs) pasts.set(key, past);
  return new Set(pairs.map(([key]) => key));
}

async function update() {
  clock = { now: main.dataset.now.split(" ").map(Number), wall: Number(main.dataset.clock) };
  let whole = true;
  const places = [...document.querySelectorAll(".charts")];
  for (const place of places) whole = append(keyOf(place), JSON.parse(place.dataset.tail)) && whole;
  places.forEach(draw);
  if (whole) return;
  const fetched = await fetchPast();
  for (const place of places) append(keyOf(place), JSON.parse(place.dataset.tail));
  places.forEach(draw);
  // A response slightly older than the page may lack an engine: it is fetched again at the next update.
  for (const key of places.map(keyOf)) if (!fetched.has(key)) pasts.delete(key);
}

// Charts.

function build(place) {
  // Screen readers pass arrow keys to a slider and read its value aloud.
  const slider = html("span", "unseen");
  slider.tabIndex = 0;
  for (const [name, value] of Object.entries({ role: "slider", "aria-label": "Moment that the charts show", "aria-valuemax": 0 }))
    slider.setAttribute(name, value);
  place.replaceChildren(slider);
  place.setAttribute("role", "group");
  place.setAttribute("aria-label", "Charts. Left and right arrow keys read values at earlier times.");
  const charts = CHARTS.map((chart) => {
    const figure = html("figure", "chart");
    const caption = html("figcaption");
    caption.append(html("b", "", chart.title));
    const values = [...chart.curves, ...(chart.limit ? [{ limit: true, legend: chart.limit, colour: "grey", form: "limit" }] : [])].map((curve) => {
      const label = html("span");
      const sample = svg("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" });
      if (curve.form === "filled") sample.append(svg("path", { class: `area ${curve.colour}`, d: "M0 5H22V10H0z" }));
      sample.append(svg("path", { class: `curve ${curve.form} ${curve.colour}`, d: "M1 5H21" }));
      if (curve.form === "dots") sample.append(svg("circle", { class: `dot ${curve.colour}`, cx: 11, cy: 5, r: 3 }));
      const value = html("i");
      label.append(sample, document.createTextNode(curve.legend), value);
      caption.append(label);
      return { label, value };
    });
    const canvas = svg("svg", { role: "img", height: HEIGHT });
    figure.append(caption, canvas);
    place.append(figure);
    return { canvas, values };
  });
  const figure = html("figure", "chart");
  const caption = html("figcaption");
  const when = html("span", "when");
  caption.append(html("b", "", "Verdicts and restarts"), when);
  const band = svg("svg", { role: "img", height: 40 + FOOT });
  figure.append(caption, band);
  place.append(figure);
  const state = { charts, band, when, slider, at: null };
  new ResizeObserver(() => draw(place)).observe(place);
  for (const kind of ["pointerdown", "pointermove"])
    place.addEventListener(kind, (event) => point(place, state, event.clientX - place.getBoundingClientRect().left));
  // Lifting a finger keeps the moment; scrolling the page with it does not.
  place.addEventListener("pointerleave", (event) => event.pointerType === "touch" || read(place, state, null));
  place.addEventListener("pointercancel", () => read(place, state, null));
  slider.addEventListener("blur", () => read(place, state, null));
  slider.addEventListener("keydown", (event) => step(place, state, event));
  return state;
}

function point(place, state, x) {
  const { from, to, width } = state.frame;
  const t = from + ((x - LEFT) / (width - LEFT - RIGHT)) * (to - from);
  read(place, state, t < from || t > to ? null : t);
}

const STEPS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -60, End: 60 };

function step(place, state, event) {
  const way = STEPS[event.key];
  if (event.key === "Escape") read(place, state, null);
  if (!way || !state.frame) return;
  event.preventDefault();
  const { from, to } = state.frame;
  const t = (state.at ?? to) + (way * (to - from)) / 60;
  read(place, state, t >= to ? null : Math.max(from, t));
}

function read(place, state, t) {
  if (state.at === t) return;
  state.at = t;
  draw(place);
}

function nearest(times, t) {
  let low = 0;
  let high = times.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < t) low = middle + 1;
    else high = middle;
  }
  return low > 0 && t - times[low - 1] < times[low] - t ? low - 1 : low;
}

const timeOf = (seconds) => new Date(1000 * seconds).toISOString().slice(11, 19);
const ago = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`);

function draw(place) {
  const past = pasts.get(keyOf(place));
  if (!past) return;
  if (!drawn.has(place)) drawn.set(place, build(place));
  const state = drawn.get(place);
  const width = Math.max(160, place.clientWidth);
  const to = clock.now[Number(place.dataset.target)] ?? past.t.at(-1) ?? 0;
  const age = to - Math.min(past.t[0] ?? to, past.verdicts[0]?.[0] ?? to);
  const span = SPANS.find((one) => one >= age) ?? SPAN;
  const frame = { from: to - span, to, span, width, gap: Math.max(6, Number(place.dataset.gap)) };
  frame.x = (t) => LEFT + ((Math.max(frame.from, t) - frame.from) / span) * (width - LEFT - RIGHT);
  frame.restarts = past.restarts.filter((t) => t >= frame.from);
  state.frame = frame;
  const moment = state.at ?? to;
  const near = nearest(past.t, moment);
  const index = Math.abs(past.t[near] - moment) <= frame.gap ? near : -1; // no poll near that moment
  CHARTS.forEach((chart, number) => drawChart(chart, state.charts[number], past, frame, state.at, index, Number(place.dataset.seats)));
  drawBand(state.band, past, frame, state.at);
  describeMoment(state, past, frame, index);
}

// Show and speak the moment that is read; nothing while that is now.
function describeMoment({ at, when, slider }, past, { to, span }, index) {
  const back = at === null ? 0 : to - at;
  const time = timeOf(clock.wall - back);
  const verdict = words(past.verdicts.findLast(([t]) => t <= at)?.[1] ?? "unknown");
  const values = CHARTS.flatMap(({ curves, show }) => curves.map(({ signal, name }) => {
    const value = past[signal][index] ?? null;
    return `${name} ${value === null ? "unknown" : show(value)}`;
  }));
  const seen = at === null ? "" : `${time} UTC, ${ago(back)}: ${verdict}`;
  if (when.textContent !== seen) when.textContent = seen;
  const spoken = at === null ? "Now" : `${time}: ${[verdict, ...values].join(", ")}`;
  for (const [name, value] of Object.entries({ min: -span, now: -Math.round(back), text: spoken }))
    if (slider.getAttribute(`aria-value${name}`) !== `${value}`) slider.setAttribute(`aria-value${name}`, value);
}

function round(most) {
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 3, 4, 5, 8, 10].find((one) => one * power >= most) * power;
}

function drawChart(chart, { canvas, values }, past, frame, at, index, seats) {
  const all = chart.curves.flatMap(({ signal }) => past[signal].filter((value) => value !== null));
  const greatest = all.reduce((most, value) => Math.max(most, value), 0);
  const limit = chart.limit && seats > 0 ? seats : 0;
  // A limit far above everything would press the curves to the floor.
  const shown = limit && limit <= 3 * Math.max(greatest, chart.least) ? limit : 0;
  const top = chart.most ?? round(Math.max(greatest, chart.least, shown) * 1.02);
  const y = (value) => HEIGHT - 6 - (Math.min(value, top) / top) * (HEIGHT - 16);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const line = y(share * top);
    parts.push(svg("path", { class: "grid", d: `M${LEFT} ${line}H${frame.width - RIGHT}` }));
    parts.push(svg("text", { class: "tick", x: LEFT - 6, y: line + 4, "text-anchor": "end" }, chart.show(share * top)));
  }
  for (const t of frame.restarts) parts.push(svg("path", { class: "again", d: `M${frame.x(t)} 2V${HEIGHT - 6}` }));
  if (shown) parts.push(svg("path", { class: "curve limit grey", d: `M${LEFT} ${y(shown)}H${frame.width - RIGHT}` }));
  for (const curve of [...chart.curves].reverse()) parts.push(...drawCurve(curve, past, frame, y));
  if (at !== null) parts.push(svg("path", { class: "cursor", d: `M${frame.x(at)} 2V${HEIGHT - 6}` }));
  canvas.setAttribute("viewBox", `0 0 ${frame.width} ${HEIGHT}`);
  canvas.replaceChildren(...parts);
  chart.curves.forEach(({ signal }, number) => {
    const value = index < 0 ? null : past[signal][index];
    values[number].value.textContent = value === null ? "?" : chart.show(value);
  });
  if (chart.limit) {
    values.at(-1).label.hidden = !limit;
    values.at(-1).value.textContent = plain(limit);
  }
  canvas.setAttribute("aria-label", describe(chart, past, frame, index));
}

function describe(chart, past, frame, index) {
  const parts = chart.curves.map(({ signal, name }) => {
    const known = past[signal].filter((value) => value !== null);
    if (known.length === 0) return `${name}: unknown`;
    const now = index < 0 ? null : past[signal][index];
    const least = known.reduce((a, b) => Math.min(a, b));
    const most = known.reduce((a, b) => Math.max(a, b));
    return `${name}: ${now === null ? "unknown" : chart.show(now)}, from ${chart.show(least)} to ${chart.show(most)}`;
  });
  return `${chart.title}. ${parts.join("; ")}; over ${Math.round(frame.span / 60)} min.`;
}

function drawCurve({ signal, colour, form }, past, frame, y) {
  const values = past[signal];
  const floor = y(0);
  const runs = [];
  let run = null;
  let before = -Infinity;
  past.t.forEach((t, index) => {
    const value = values[index];
    if (value === null || t < frame.from) run = null;
    else {
      // No line crosses a gap or a restart.
      if (!run || t - before > frame.gap || frame.restarts.some((again) => before < again && again <= t)) runs.push((run = []));
      run.push([frame.x(t).toFixed(1), y(value).toFixed(1), value]);
    }
    before = t;
  });
  const parts = [];
  const line = runs.map((one) => `M${one.map(([x, v]) => `${x} ${v}`).join("L")}${one.length === 1 ? "h0.1" : ""}`).join("");
  if (form === "filled") {
    const areas = runs.map((one) => `M${one[0][0]} ${floor}L${one.map(([x, v]) => `${x} ${v}`).join("L")}V${floor}z`);
    parts.push(svg("path", { class: `area ${colour}`, d: areas.join("") }));
  }
  if (form === "dots") {
    // Rings on a dashed line, only where the value is not 0.
    const rings = [];
    for (const ring of runs.flat()) if (ring[2] > 0 && !(ring[0] - rings.at(-1)?.[0] < 10)) rings.push(ring);
    const ridges = runs.map((one) => one.filter(([, , value], i) => value > 0 || one[i - 1]?.[2] > 0 || one[i + 1]?.[2] > 0));
    parts.push(svg("path", { class: `curve dash ${colour}`, d: ridges.filter((one) => one.length).map((one) => `M${one.map(([x, v]) => `${x} ${v}`).join("L")}`).join("") }));
    for (const [x, v] of rings) parts.push(svg("circle", { class: `dot ${colour}`, cx: x, cy: v, r: 3 }));
    return parts;
  }
  parts.push(svg("path", { class: `curve ${form} ${colour}`, d: line }));
  return parts;
}

// Height and colour of a block show its severity.
const RISE = { none: 6, info: 11, warning: 16, critical: 22 };

function drawBand(canvas, past, frame, at) {
  const parts = [];
  const labels = [];
  past.verdicts.forEach(([t, verdict, severity], number) => {
    const end = past.verdicts[number + 1]?.[0] ?? frame.to;
    if (end < frame.from) return;
    const [x, right, rise] = [frame.x(t), frame.x(end), RISE[severity]];
    const name = words(verdict);
    const block = svg("rect", { class: `band ${severity}`, x, y: 38 - rise, width: Math.max(1.5, right - x), height: rise });
    block.append(svg("title", {}, `${name}, ${severity}`));
    parts.push(block);
    if (right - x > 5.9 * name.length) parts.push(svg("text", { class: "bandname", x: x + 3, y: 34 - rise }, name));
    labels.push(`${name} since ${ago(frame.to - t)}`);
  });
  for (const t of frame.restarts) {
    const x = frame.x(t);
    parts.push(svg("path", { class: "again", d: `M${x} 4V38` }), svg("path", { class: "mark", d: `M${x - 4} 0h8l-4 6z` }));
    labels.push(`restart ${ago(frame.to - t)}`);
  }
  if (at !== null) parts.push(svg("path", { class: "cursor", d: `M${frame.x(at)} 2V38` }));
  for (const share of [0, 0.5, 1]) {
    const seconds = (1 - share) * frame.span;
    const text = seconds === 0 ? "now" : seconds < 60 ? `−${seconds} s` : `−${+(seconds / 60).toFixed(1)} min`;
    const x = frame.x(frame.from + share * frame.span);
    parts.push(svg("text", { class: "tick", x, y: 38 + FOOT - 3, "text-anchor": ["start", "middle", "end"][2 * share] }, text));
  }
  canvas.setAttribute("viewBox", `0 0 ${frame.width} ${40 + FOOT}`);
  canvas.setAttribute("aria-label", `Verdicts and restarts: ${labels.slice(-8).join("; ")}.`);
  canvas.replaceChildren(...parts);
}

// Copying.

async function copy(button) {
  const code = button.previousElementSibling;
  let done = false;
  try {
    await navigator.clipboard.writeText(code.textContent);
    done = true;
  } catch {
    getSelection().selectAllChildren(code); // no clipboard without TLS: select the text instead
    done = document.execCommand("copy");
  }
  button.textContent = done ? "Copied" : "Selected";
  say("said", `${button.textContent}: ${code.textContent}`);
}

document.addEventListener("click", (event) => {
  const button = event.target instanceof Element && event.target.closest("button.copy");
  if (button) copy(button);
});
document.addEventListener("pointerdown", (event) => {
  for (const place of document.querySelectorAll(".charts"))
    if (drawn.has(place) && !place.contains(event.target)) read(place, drawn.get(place), null);
});
document.addEventListener("visibilitychange", () => document.hidden || turn());
document.documentElement.classList.add("js");
update().catch(() => {}).finally(() => {
  busy = false;
  waiting = setTimeout(turn, 1000 * Number(main.dataset.every || 2));
});
