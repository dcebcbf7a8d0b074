// The live page. It asks /live once a second and draws what it says. Text from the data only ever becomes a text node.

const ASK_EVERY_MS = 1000;
const ASK_TIMEOUT_MS = 4000;
const STALE_AFTER_MS = 4000;
const LIST_EVERY_MS = 2000;
const OLD_REPORT_S = 10;
const ROWS_FROM = 9; // workers of a role from which each gets one line
const TILES_FROM = 33; // and from which each gets a tile
const LINES_MOST = 160;
const FULL_BACKLOG_S = 1; // a prefill worker's load bar is full at the least TTFT SLO, or here; or at the longest backlog
const KV_WARN = 0.85;
const KV_BAD = 0.95;

const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

const view = {
  doc: null, // the last document
  answeredMs: 0, // when the last new one came, on the page's own clock
  fault: null, // why there was none
  held: false,
  worker: null, // address of the chosen worker
  decision: null, // the chosen decision itself: it stays when it has left the list
  listedMs: 0,
};

// -- making elements ------------------------------------------------------------------------------------------------------

function make(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function draw(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// -- words and numbers ----------------------------------------------------------------------------------------------------

function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 5e-6) return "0 ms";
  if (seconds >= 9.95) return `${seconds.toFixed(0)} s`;
  if (seconds >= 0.9995) return `${seconds.toFixed(2)} s`;
  const ms = seconds * 1000;
  return `${ms >= 99.5 ? ms.toFixed(0) : ms >= 9.95 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}

function milliseconds(ms) {
  return ms >= 9.95 ? Math.round(ms).toLocaleString("en") : ms >= 0.05 ? ms.toFixed(1) : "0";
}

function count(number) {
  if (number >= 999_500) return `${(number / 1e6).toFixed(1)} M`;
  return number >= 99_999.5 ? `${(number / 1e3).toFixed(0)} k` : Math.round(number).toLocaleString("en");
}

function rate(number) {
  return number >= 99.5 ? number.toFixed(0) : number >= 9.95 ? number.toFixed(1) : number.toFixed(2);
}

function plural(number, what) {
  return `${count(number)} ${what}${number === 1 ? "" : "s"}`;
}

function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${(share * 100).toFixed(share > 0.0005 && share < 0.0995 ? 1 : 0)} %`;
}

function span(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.floor(seconds / 86_400)} d`;
}

function clock(unixS) {
  return new Date(unixS * 1000).toLocaleTimeString("en-GB");
}

// -- asking ---------------------------------------------------------------------------------------------------------------

async function ask() {
  if (view.held || document.hidden) return;
  try {
    const response = await fetch("live", { cache: "no-store", signal: AbortSignal.timeout(ASK_TIMEOUT_MS) });
    if (!response.ok) throw new Error(`the filter answered ${response.status}`);
    const doc = await response.json();
    if (doc.version !== 1) throw new Error(`/live has version ${doc.version}, this page knows 1: load it again`);
    if (doc.at !== view.doc?.at) view.answeredMs = performance.now();
    view.doc = doc;
    view.fault = null;
  } catch (error) {
    view.fault = error.name === "TimeoutError" ? "it took too long to answer" : error.message;
  }
}

async function turn() {
  await ask();
  show();
  setTimeout(turn, ASK_EVERY_MS);
}

// -- all of it ------------------------------------------------------------------------------------------------------------

function show() {
  showState();
  const doc = view.doc;
  if (doc === null) return;
  showTimes($("ttft"), doc.times.ttft, doc, "ttft");
  showTimes($("itl"), doc.times.itl, doc, "itl");
  showRates(doc);
  showBy(doc);
  showQueue(doc);
  showPool(doc);
  showWorker(doc);
  showList(doc);
  showFacts(doc);
}

function showState() {
  const doc = view.doc;
  const silentMs = performance.now() - view.answeredMs;
  const stale = doc !== null && silentMs > STALE_AFTER_MS && !view.held;
  const gone = doc === null && view.fault !== null;
  document.body.classList.toggle("stale", stale);
  const notices = [];
  let [kind, word] = ["", "Asking the filter …"];
  if (gone || stale) {
    [kind, word] = ["bad", "No answer"];
    const why = view.fault === null ? "" : ` (${view.fault})`;
    notices.push(["bad", stale
      ? `The filter has not answered for ${span(silentMs / 1000)}${why}. What you see is from ${clock(doc.at)}. ` +
        "Is it running? If it ended, its log says why."
      : `The filter does not answer${why}. Is it running, and is this its admin port?`]);
  } else if (doc !== null) {
    const filter = doc.filter;
    [kind, word] = filter.draining ? ["warn", "Draining"] : filter.ready ? ["good", "Ready"] : ["bad", "Not ready"];
    if (filter.draining) notices.push(["warn", "The filter has been told to stop: it finishes what is open and takes nothing new."]);
    else if (!filter.ready) notices.push(["bad", `Requests are not served: ${filter.why ?? "no reason was given"}.`]);
    for (const source of filter.discovery) {
      if (source.error !== null) {
        notices.push(["warn", `Workers from ${source.kind} ${source.name}: ${source.error}. What it said before is kept.`]);
      }
    }
    if (doc.workers_left_out > 0) notices.push(["warn", `${count(doc.workers_left_out)} more workers are not shown.`]);
  }
  const state = $("state");
  say(state, word);
  state.className = `pill ${kind}`;
  const about = doc === null ? "" : `${view.held ? "paused at" : "as of"} ${clock(doc.at)} · version ${doc.filter.version} · up ${span(doc.filter.uptime_s)}`;
  say($("about"), about);
  const text = notices.map(([, words]) => words).join("\n");
  if ($("notices").dataset.text !== text) { // or a screen reader would read it out every second
    $("notices").dataset.text = text;
    $("notices").replaceChildren(...notices.map(([how, words]) => make("p", { class: `notice ${how}` }, words)));
  }
}

// -- figures --------------------------------------------------------------------------------------------------------------

function figure(panel) {
  if (panel.parts === undefined) {
    const parts = { big: make("p", { class: "big" }), more: make("p", { class: "more" }), spark: make("div", { class: "spark" }),
      source: make("p", { class: "source" }) };
    panel.append(parts.big, parts.more, parts.spark, parts.source);
    panel.parts = parts;
  }
  return panel.parts;
}

function number(words, value, bad) {
  return make("span", { class: bad ? "bad" : null }, `${words} `, make("b", null, value));
}

function target(doc, name) {
  let least = null;
  for (const each of doc.targets) {
    const seconds = each[`${name}_s`];
    if (seconds !== null && (least === null || seconds < least.seconds)) least = { seconds, policy: each.policy };
  }
  return least;
}

function showTimes(panel, found, doc, name) {
  const parts = figure(panel);
  const slo = target(doc, name);
  const first = found === null ? null : found.p50_s ?? found.mean_s;
  if (first === null) {
    parts.big.replaceChildren("–");
    parts.more.replaceChildren(doc.times.window_s === null && name === "ttft"
      ? "only Envoy's access log tells, and it is off" : "no answer lately");
  } else {
    parts.big.replaceChildren(time(first), make("small", null, found.p50_s === null ? "mean" : "median"));
    const over = (seconds) => slo !== null && seconds !== null && seconds > slo.seconds;
    parts.more.replaceChildren(...[
      found.p90_s === null ? null : number("p90", time(found.p90_s), over(found.p90_s)),
      found.p99_s === null ? null : number("p99", time(found.p99_s), over(found.p99_s)),
      found.samples === null ? null : number("of", count(found.samples)),
    ].filter((each) => each !== null));
  }
  const history = doc.history;
  sparkline(parts.spark, history[`${name}_p50_s`], history[`${name}_p99_s`], slo?.seconds ?? null,
    `${name.toUpperCase()} of the last ${span(history.step_s * history.requests_per_s.length)}`);
  const from = found === null ? "" : `${found.source === "engines" ? "as the engines report it" : "as clients see it"}` +
    `${found.samples === null ? "" : `, ${span(doc.times.window_s)}`}`;
  const goal = slo === null ? "" : `${from === "" ? "" : " · "}SLO ${time(slo.seconds)} (${slo.policy})`;
  say(parts.source, `${first === null ? "" : from}${goal}`);
}

function showRates(doc) {
  const parts = figure($("rates"));
  const rates = doc.rates;
  parts.big.replaceChildren(rate(rates.requests_per_s), make("small", null, "per second"));
  parts.more.replaceChildren(
    number("handed over", rate(rates.handoffs_per_s)), number("whole", rate(rates.whole_per_s)),
    number("refused", rate(rates.refused_per_s), rates.refused_per_s > 0),
    number("errors", rate(rates.errors_per_s), rates.errors_per_s > 0));
  sparkline(parts.spark, doc.history.requests_per_s, [], null, "requests a second");
  say(parts.source, `over ${span(doc.window_s)}`);
}

function showQueue(doc) {
  const parts = figure($("queue"));
  const queue = doc.queue;
  parts.big.replaceChildren(count(queue.requests), make("small", null, queue.requests === 1 ? "prompt waits" : "prompts wait"));
  parts.more.replaceChildren(number("prefill work", time(queue.work_s)), number("longest wait", time(queue.longest_wait_s)));
  sparkline(parts.spark, doc.history.queue_requests, [], null, "prompts that waited");
  const waiting = doc.filter.warm_up.waiting_requests;
  say(parts.source, waiting > 0 ? `${plural(waiting, "more prompt")} for workers to be warm` : "");
}

function showBy(doc) {
  $("by").hidden = doc.times.by.length === 0;
  if (doc.times.by.length === 0) return;
  say($("by-note"), `streamed answers of the last ${span(doc.times.window_s)}`);
  const slos = new Map(doc.targets.map((each) => [each.policy, each]));
  const three = (found, slo) => ["p50_s", "p90_s", "p99_s"].map((name) => {
    const late = slo !== null && slo !== undefined && found !== null && found[name] > slo;
    return make("td", { class: late ? "late" : null }, found === null ? "–" : time(found[name]));
  });
  const rows = doc.times.by.map((each) => {
    const slo = slos.get(each.policy);
    return make("tr", null,
      make("td", { class: "name" }, each.policy), make("td", { class: "name" }, each.model), make("td", { class: "name" }, each.mode),
      make("td", null, count(each.answers)),
      ...three(each.ttft, slo?.ttft_s), make("td", { class: "goal" }, time(slo?.ttft_s)),
      ...three(each.itl, slo?.itl_s), make("td", { class: "goal" }, time(slo?.itl_s)));
  });
  const heads = ["policy", "model", "mode", "answers", "TTFT p50", "p90", "p99", "SLO", "ITL p50", "p90", "p99", "SLO"];
  $("by-table").replaceChildren(make("table", null,
    make("thead", null, make("tr", null, ...heads.map((name, index) => make("th", { scope: "col", class: index < 3 ? "name" : null }, name)))),
    make("tbody", null, ...rows)));
}

const WIDE = 300, HIGH = 44, POINTS = 150;

function sparkline(box, main, upper, slo, label) {
  let svg = box.firstElementChild;
  if (svg === null) {
    svg = draw("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img" });
    for (const name of ["floor", "slo", "p99", "one"]) svg.append(draw("path", { class: name, d: "" }));
    box.append(svg);
  }
  const known = [...main, ...upper].filter((value) => value !== null);
  const highest = Math.max(...known, slo === null ? 0 : slo * 1.1, 1e-9);
  const y = (value) => HIGH - 1 - (value / highest) * (HIGH - 4);
  const [floor, goal, second, first] = svg.children;
  svg.setAttribute("aria-label", known.length === 0 ? `${label}: nothing yet` : `${label}: highest ${known.length ? Number(Math.max(...known).toPrecision(3)) : 0}`);
  floor.setAttribute("d", `M0 ${HIGH - 1}H${WIDE}`);
  goal.setAttribute("d", slo === null ? "" : `M0 ${y(slo).toFixed(1)}H${WIDE}`);
  first.setAttribute("d", path(main, y));
  second.setAttribute("d", path(upper, y));
}

function path(values, y) {
  const step = WIDE / (POINTS - 1);
  const from = POINTS - values.length; // the newest point is at the right edge
  let d = "";
  let pen = "M";
  values.forEach((value, index) => {
    if (value === null) {
      pen = "M";
      return;
    }
    d += `${pen}${((from + index) * step).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return d;
}

// -- the pool -------------------------------------------------------------------------------------------------------------

const cells = { prefill: new Map(), decode: new Map() };
const lines = new Map();

function showPool(doc) {
  const of = { prefill: [], decode: [] };
  for (const worker of doc.workers) for (const role of worker.roles) of[role]?.push(worker);
  const most = {
    backlog: Math.max(target(doc, "ttft")?.seconds ?? FULL_BACKLOG_S, ...doc.workers.map((each) => each.backlog_s)),
    requests: Math.max(8, ...doc.workers.map((each) => each.decode_requests)),
  };
  const widest = Math.max(of.prefill.length, of.decode.length);
  const picture = $("picture");
  picture.classList.toggle("rows", widest >= ROWS_FROM && widest < TILES_FROM);
  picture.classList.toggle("tiles", widest >= TILES_FROM);
  say($("legend-load"), widest >= TILES_FROM ? "number: requests in flight" : "load: prefill work in seconds, decode in requests");
  say($("legend-kv"), widest >= TILES_FROM ? "filled: KV cache in use" : "KV cache in use");
  picture.classList.toggle("chosen-one", view.worker !== null);
  for (const role of ["prefill", "decode"]) {
    showSide(role, of[role], most, doc);
  }
  const bad = doc.workers.filter((each) => each.state !== "live").length;
  say($("pool-sum"), doc.workers.length === 0 ? "" : `${plural(doc.workers.length, "worker")}${bad ? `, ${count(bad)} not live` : ", all live"}`);
  const handoffs = doc.pairs.reduce((sum, pair) => sum + pair.count, 0);
  say($("flow-sum"), doc.workers.length === 0 ? "" : `${plural(handoffs, "handoff")} in ${span(doc.window_s)}`);
  showFlows(doc);
}

function showSide(role, workers, most, doc) {
  const box = $(`cells-${role}`);
  const have = cells[role];
  const live = workers.filter((each) => each.state === "live").length;
  const title = role === "prefill" ? "Prefill" : "Decode";
  say($(`title-${role}`), workers.length ? `${title} · ${live} of ${workers.length} live` : title);
  const wanted = new Set(workers.map((each) => each.address));
  for (const [address, cell] of have) {
    if (!wanted.has(address)) {
      cell.remove();
      have.delete(address);
    }
  }
  let empty = box.querySelector(".empty");
  if (workers.length === 0) {
    if (empty === null) {
      box.append(make("p", { class: "empty" }));
      empty = box.querySelector(".empty");
    }
    say(empty, noWorkers(role, doc));
    return;
  }
  empty?.remove();
  workers.forEach((worker, index) => {
    let cell = have.get(worker.address);
    if (cell === undefined) {
      cell = newCell(worker.address);
      have.set(worker.address, cell);
    }
    if (box.children[index] !== cell) box.insertBefore(cell, box.children[index] ?? null);
    fillCell(cell, worker, role, most);
  });
  // One stop of the Tab key for a whole role; the arrow keys go on from there.
  const all = [...box.children];
  if (!all.some((cell) => cell.tabIndex === 0)) all[0].tabIndex = 0;
}

function walk(event) {
  const cell = event.target.closest(".cell");
  if (cell === null) return;
  const all = [...cell.parentElement.children];
  const across = all.filter((each) => each.offsetTop === all[0].offsetTop).length;
  const at = all.indexOf(cell);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + across, ArrowUp: at - across, Home: 0, End: all.length - 1 }[event.key];
  if (to === undefined || all[to] === undefined) return;
  event.preventDefault();
  cell.tabIndex = -1;
  all[to].tabIndex = 0;
  all[to].focus();
}

function noWorkers(role, doc) {
  const sources = doc.filter.discovery.map((each) => `${each.kind} ${each.name}`).join(", ");
  return `No ${role} workers. Name some under workers.${role} in the configuration, or start them where they are looked for` +
    `${sources === "" ? "" : ` (${sources})`}. "baton check" shows what the configuration means.`;
}

function newCell(address) {
  const parts = {
    name: make("span", { class: "name" }, address), state: make("span", { class: "state" }),
    load: make("i"), kv: make("i"), loadWords: make("output"), kvWords: make("output"), words: make("p", { class: "words" }),
    fill: make("i"), number: make("b"),
  };
  const kvBar = make("div", { class: "bar kv" }, parts.kv);
  const cell = make("button", { class: "cell", type: "button", tabindex: "-1", "aria-pressed": "false", on: { click: () => choose(address) } },
    make("span", { class: "tile" }, parts.fill, parts.number),
    make("div", { class: "line" }, parts.name, parts.state),
    make("div", { class: "bars" },
      make("span", null, "load"), make("div", { class: "bar" }, parts.load), parts.loadWords,
      make("span", null, "KV"), kvBar, parts.kvWords),
    parts.words);
  cell.parts = { ...parts, kvBar };
  return cell;
}

function fillCell(cell, worker, role, most) {
  const parts = cell.parts;
  const prefill = role === "prefill";
  const requests = prefill ? worker.prefill_requests : worker.decode_requests;
  const load = prefill ? worker.backlog_s / most.backlog : requests / most.requests;
  const kv = worker.kv_usage;
  const chosen = view.worker === worker.address;
  cell.className = `cell ${worker.state}`;
  cell.setAttribute("aria-pressed", String(chosen));
  say(parts.state, worker.state);
  parts.load.style.width = `${Math.min(100, load * 100).toFixed(1)}%`;
  parts.kv.style.width = parts.fill.style.height = `${((kv ?? 0) * 100).toFixed(1)}%`;
  parts.kvBar.className = `bar kv${kv >= KV_BAD ? " bad" : kv >= KV_WARN ? " warn" : ""}`;
  say(parts.loadWords, prefill ? time(worker.backlog_s) : plural(requests, "request"));
  say(parts.kvWords, percent(kv));
  say(parts.number, String(requests));
  const old = worker.report_age_s !== null && worker.report_age_s > OLD_REPORT_S ? ` · report ${span(worker.report_age_s)} old` : "";
  const engine = worker.running === null ? "no report yet" : `engine: ${count(worker.running)} running, ${count(worker.waiting ?? 0)} waiting`;
  const tokens = `${plural(requests, "request")}, ${count(prefill ? worker.prefill_tokens : worker.decode_tokens)} tokens`;
  say(parts.words, worker.state === "live" ? `${prefill ? tokens : `${count(worker.decode_tokens)} tokens`} · ${engine}${old}` : worker.why ?? worker.state);
  const label = `${role} worker ${worker.address}, ${worker.state}, ${plural(requests, "request")}, KV ${percent(kv)}`;
  if (cell.getAttribute("aria-label") !== label) cell.setAttribute("aria-label", label);
  cell.title = `${worker.address} · ${worker.state} · ${tokens} · KV ${percent(kv)}`;
}

function choose(address) {
  view.worker = view.worker === address ? null : address;
  show();
}

function showFlows(doc) {
  const svg = $("flows");
  const frame = svg.getBoundingClientRect();
  const pairs = doc.pairs.filter((pair) => cells.prefill.has(pair.prefill) && cells.decode.has(pair.decode)).slice(0, LINES_MOST);
  const most = Math.max(1, ...pairs.map((pair) => pair.count));
  const many = pairs.length > 40;
  svg.classList.toggle("many", many);
  const seen = new Set();
  const edge = (role, address) => {
    const box = cells[role].get(address).getBoundingClientRect();
    return box.top + box.height / 2 - frame.top;
  };
  for (const pair of pairs) {
    const key = `${pair.prefill} ${pair.decode}`;
    seen.add(key);
    let both = lines.get(key);
    if (both === undefined) {
      both = [draw("path", { class: "flow" }), draw("path", { class: "flow-move" })];
      lines.set(key, both);
      svg.append(...both);
    }
    const [from, to] = [edge("prefill", pair.prefill), edge("decode", pair.decode)];
    const x = frame.width;
    const d = `M4 ${from.toFixed(1)}C${(x * 0.45).toFixed(1)} ${from.toFixed(1)} ${(x * 0.55).toFixed(1)} ${to.toFixed(1)} ${(x - 4).toFixed(1)} ${to.toFixed(1)}`;
    const of = view.worker === pair.prefill || view.worker === pair.decode ? " of-chosen" : "";
    for (const line of both) if (line.getAttribute("d") !== d) line.setAttribute("d", d);
    both[0].setAttribute("class", `flow${of}`);
    both[1].setAttribute("class", `flow-move${of}`);
    both[0].setAttribute("stroke-width", ((many ? 0.7 : 1) + (many ? 2.3 : 4) * Math.sqrt(pair.count / most)).toFixed(1));
  }
  for (const [key, both] of lines) {
    if (!seen.has(key)) {
      both.forEach((line) => line.remove());
      lines.delete(key);
    }
  }
}

function fact(name, value, how) {
  return [make("div", { class: how?.wide ? "wide" : null }, make("dt", null, name), make("dd", { class: how?.class }, value))];
}

function showWorker(doc) {
  const box = $("worker");
  const worker = view.worker === null ? undefined : doc.workers.find((each) => each.address === view.worker);
  box.hidden = view.worker === null;
  if (view.worker === null) return;
  if (box.of !== view.worker) { // the button keeps its focus while the facts change
    box.of = view.worker;
    box.facts = make("dl", { class: "grid" });
    box.pairs = make("p", { class: "pairs-of quiet" });
    box.replaceChildren(
      make("div", { class: "title" }, make("strong", null, view.worker),
        make("button", { type: "button", on: { click: () => choose(view.worker) } }, "Close")),
      box.facts, box.pairs);
  }
  if (worker === undefined) {
    box.facts.replaceChildren(...fact("State", "gone: no longer in the pool", { class: "bad" }));
    box.pairs.replaceChildren();
    return;
  }
  const labels = Object.entries(worker.labels).map(([name, value]) => `${name}=${value}`).join(", ");
  const age = worker.report_age_s;
  box.facts.replaceChildren(
    ...fact("State", worker.why === null ? worker.state : `${worker.state}: ${worker.why}`, { class: worker.state === "live" ? null : "bad", wide: worker.why !== null }),
    ...fact("Role", worker.roles.join(", ")),
    ...(worker.pool == null ? [] : fact("Pool", worker.pool)),
    ...fact("In flight through this filter", `${count(worker.prefill_requests)} prefill, ${count(worker.decode_requests)} decode`),
    ...fact("Tokens", `${count(worker.prefill_tokens)} to prefill, ${count(worker.decode_tokens)} in its KV cache`),
    ...fact("Prefill backlog", time(worker.backlog_s)),
    ...fact("Of others", plural(worker.other_requests, "request")),
    ...fact("Engine", worker.running === null ? "–" : `${count(worker.running)} running, ${count(worker.waiting ?? 0)} waiting`),
    ...fact("KV cache", `${percent(worker.kv_usage)}${worker.kv_tokens === null ? "" : ` of ${count(worker.kv_tokens)} tokens`}`,
      { class: worker.kv_usage >= KV_BAD ? "bad" : worker.kv_usage >= KV_WARN ? "warn" : null }),
    ...fact("Time between tokens", time(worker.itl_s)),
    ...fact("Last report", age === null ? "none yet" : `${age.toFixed(1)} s ago`, { class: age === null || age > OLD_REPORT_S ? "warn" : null }),
    ...fact("Models", worker.models.join(", ") || "–"),
    ...fact("Labels", labels || "–"),
  );
  const given = doc.pairs.filter((pair) => pair.prefill === worker.address).map((pair) => `→ ${pair.decode} ${count(pair.count)}`);
  const taken = doc.pairs.filter((pair) => pair.decode === worker.address).map((pair) => `← ${pair.prefill} ${count(pair.count)}`);
  say(box.pairs, worker.handoffs === 0 ? `No handoffs in the last ${span(doc.window_s)}.`
    : `Handoffs in the last ${span(doc.window_s)}: ${[...given, ...taken].slice(0, 40).join(" · ")}`);
}

// -- decisions ------------------------------------------------------------------------------------------------------------

function showList(doc) {
  const box = $("decision-list");
  const busy = view.decision !== null || box.matches(":hover") || box.contains(document.activeElement);
  const note = view.decision !== null ? "kept still while one is open" : busy ? "kept still while you are here"
    : "choose one to see what was weighed";
  say($("decisions-note"), doc.decisions.length === 0 ? "" : note);
  const now = performance.now();
  if (box.children.length > 1 && (busy || now - view.listedMs < LIST_EVERY_MS)) return;
  view.listedMs = now;
  if (doc.decisions.length === 0) {
    const host = doc.filter.listens_on.replace(/^0\.0\.0\.0/, "127.0.0.1");
    const at = host.startsWith("unix:") ? "ENVOY" : host;
    box.replaceChildren($("decision"), make("div", { class: "empty" }, "No prompt was placed yet. Send one through Envoy:",
      make("code", null, `curl http://${at}/v1/completions -H 'content-type: application/json' \\\n  -d '{"model": "MODEL", "prompt": "Hello", "max_tokens": 16}'`)));
    return;
  }
  box.replaceChildren(headings(), ...doc.decisions.map(row), $("decision"));
}

function headings() {
  const heading = (words, right) => make("span", { class: right ? "right" : null }, words);
  return make("div", { class: "decision headings", "aria-hidden": "true" }, heading("time"), heading("prefill → decode"),
    heading("policy, reason"), heading("tokens", true), heading("cached", true), heading("queued", true), heading("TTFT expected", true));
}

function workers(decision) {
  if (decision.prefill === null) return [make("span", { class: "into" }, decision.decode), " alone"];
  return [make("span", { class: "from" }, decision.prefill), " → ", make("span", { class: "into" }, decision.decode)];
}

function cachedShare(decision) {
  return decision.prompt_tokens ? decision.cached_tokens / decision.prompt_tokens : 0;
}

function cachedWords(decision) {
  const below = Object.entries(decision.below_tokens).map(([tier, tokens]) => `, ${count(tokens)} in ${tier}`);
  const rank = decision.prefill === null ? decision.decode_rank : decision.prefill_rank;
  const named = rank === null ? "" : `, rank ${rank}`;
  return `${count(decision.cached_tokens)} tokens, says: ${decision.cached_by.replaceAll("_", " ")}${named}${below.join("")}`;
}

function same(one, other) {
  return one !== null && one.at === other.at && one.request_id === other.request_id;
}

function row(decision) {
  const open = same(view.decision, decision);
  return make("button", { class: "decision", type: "button", "aria-expanded": String(open), "aria-controls": "decision",
    on: { click: (event) => chooseDecision(decision, event.currentTarget) } },
  make("span", { class: "when" }, clock(decision.at)),
  make("span", { class: "to" }, ...workers(decision)),
  make("span", { class: "reason" }, `${decision.policy}, ${decision.reason.replaceAll("_", " ")}`),
  make("span", { class: "right tokens" }, count(decision.prompt_tokens)),
  make("span", { class: "right tokens", title: cachedWords(decision) }, percent(cachedShare(decision))),
  make("span", { class: "right tokens" }, `${milliseconds(decision.queued_ms)} ms`),
  make("span", { class: "right tokens" }, `${milliseconds(decision.ttft_ms)} ms`));
}

function chooseDecision(decision, button) {
  const again = same(view.decision, decision);
  view.decision = again ? null : decision;
  for (const each of $("decision-list").querySelectorAll("[aria-expanded]")) each.setAttribute("aria-expanded", "false");
  button.setAttribute("aria-expanded", String(!again));
  button.after($("decision")); // where the eye is, and the next stop of the keyboard
  showDecision();
}

function closeDecision() {
  const open = $("decision-list").querySelector("[aria-expanded=true]");
  if ($("decision").contains(document.activeElement)) open?.focus();
  view.decision = null;
  for (const each of $("decision-list").querySelectorAll("[aria-expanded]")) each.setAttribute("aria-expanded", "false");
  showDecision();
}

function showDecision() {
  const box = $("decision");
  const decision = view.decision;
  box.hidden = decision === null;
  if (decision === null) return;
  box.replaceChildren(
    make("div", { class: "title" }, make("strong", null, decision.request_id),
      make("button", { type: "button", on: { click: closeDecision } }, "Close")),
    make("dl", { class: "grid" },
      ...fact("Went to", decision.prefill === null ? `${decision.decode} alone` : `${decision.prefill} → ${decision.decode}`, { wide: true }),
      ...fact("When", clock(decision.at)),
      ...fact("Why", decision.reason.replaceAll("_", " ")),
      ...fact("Policy", `${decision.policy}, objective ${decision.objective}`),
      ...fact("Prompt", `${count(decision.prompt_tokens)} tokens, ${percent(cachedShare(decision))} expected in a cache`),
      ...fact("Waited here", `${milliseconds(decision.queued_ms)} ms`),
      ...fact("TTFT expected", `${milliseconds(decision.ttft_ms)} ms`)),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "What was weighed" }, costTable(decision)),
    make("p", { class: "quiet" }, `Times in milliseconds. Cost is what the objective makes of them; the least wins. ${decision.candidates.length > 1
      ? "The cheapest candidates are kept." : "No other candidate was kept: \"baton explain\" weighs a request against all workers."}`));
}

const TERMS = ["queue_prefill", "prefill", "load", "transfer", "handshake", "overhead", "penalty", "queue_decode", "generation", "stall", "hold"];

function costTable(decision) {
  const used = TERMS.filter((name) => decision.candidates.some((each) => (each.terms_ms[name] ?? 0) >= 0.05));
  const heads = ["prefill worker", "decode worker", ...used.map((name) => name.replaceAll("_", " ")), "cached", "cost"];
  const head = make("tr", null, ...heads.map((name, index) => make("th", { scope: "col", class: index < 2 ? "name" : null }, name)),
    make("th", { scope: "col", class: "words" }, "why not"));
  const rows = decision.candidates.map((each) => make("tr", { class: each.why === null ? "won" : null },
    make("td", { class: "name mono" }, each.prefill ?? "–"), make("td", { class: "name mono" }, each.decode),
    ...used.map((name) => make("td", null, milliseconds(each.terms_ms[name] ?? 0))),
    make("td", null, `${each.prefill === null ? "–" : count(each.cached_prefill_tokens)} / ${count(each.cached_decode_tokens)}`),
    make("td", null, milliseconds(each.cost * 1000)),
    make("td", { class: "words" }, each.why ?? "chosen")));
  return make("table", null, make("thead", null, head), make("tbody", null, ...rows));
}

// -- the filter -----------------------------------------------------------------------------------------------------------

function showFacts(doc) {
  const filter = doc.filter;
  const warm = filter.warm_up;
  const cold = warm.pairs - warm.pairs_warm;
  $("facts").replaceChildren(
    ...fact("State", filter.draining ? "draining" : filter.ready ? "ready" : `not ready: ${filter.why}`, { class: filter.ready ? null : filter.draining ? "warn" : "bad" }),
    ...fact("Warm pairs", warm.enabled ? `${count(warm.pairs_warm)} of ${count(warm.pairs)}` : "warm-up is off", { class: warm.enabled && cold > 0 ? "warn" : null }),
    ...fact("Envoy takes requests at", filter.listens_on),
    ...filter.discovery.flatMap((each) => fact(`Workers from ${each.kind}`,
      `${each.name}${each.name === "" ? "" : ": "}${each.endpoints === null ? "never read" : plural(each.endpoints, "worker")}${each.error === null ? "" : `; ${each.error}`}`,
      { class: each.error === null ? null : "bad" })),
    ...Object.entries(filter.cache_servers).flatMap(([address, state]) => fact(`Cache server ${address}`, state, { class: state === "ok" ? null : "bad" })),
    ...warm.failing.flatMap((words) => fact("Pair that does not work", words, { class: "bad", wide: true })),
  );
}

// -- what people do -------------------------------------------------------------------------------------------------------

$("hold").addEventListener("click", () => {
  view.held = !view.held;
  $("hold").setAttribute("aria-pressed", String(view.held));
  say($("hold"), view.held ? "Go on" : "Pause");
  if (!view.held) view.answeredMs = performance.now();
  show();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  view.worker = null;
  closeDecision();
  show();
});
for (const role of ["prefill", "decode"]) {
  $(`cells-${role}`).addEventListener("keydown", walk);
  $(`cells-${role}`).addEventListener("click", (event) => { // the stop goes along with the pointer
    const cell = event.target.closest(".cell");
    if (cell === null) return;
    for (const each of cell.parentElement.children) each.tabIndex = each === cell ? 0 : -1;
  });
}
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  view.answeredMs = performance.now(); // nobody asked while nobody looked
  ask().then(show);
});
new ResizeObserver(() => view.doc !== null && showFlows(view.doc)).observe($("picture"));

turn();
