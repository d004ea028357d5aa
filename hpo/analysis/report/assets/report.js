"use strict";
/* Brings a report's page to life: figures where they come into sight, filters, marked trials, light and dark. */
const Report = (() => {
  const ROWS = 100, RESTS = 5, FRESH = 5000, { STATES, figure, label, safe } = Figures;
  const COLOURS = ["paper", "ink", "soft", "line", "chosen", ...STATES];
  const dark = matchMedia("(prefers-color-scheme: dark)"), print = matchMedia("print");
  const ofMarks = (figure) => ["curves", "chosen"].includes(figure), ofShown = (figure) => !["importances", "timeline"].includes(figure);
  const pages = [], live = "live" in document.documentElement.dataset;

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  function colours() {
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  function face() {
    return getComputedStyle(document.body).fontFamily;
  }

  /* Make parts of a node anew; what had the focus has it again. */
  function keepFocus(node, make) {
    const had = document.activeElement, named = (one) => [one.tagName, one.name, one.value, one.title, one.ariaLabel, one.textContent].join();
    const name = node.contains(had) && named(had);
    make();
    if (name && document.activeElement !== had) [...node.querySelectorAll("input, select, button, a")].find((one) => named(one) === name)?.focus({ preventScroll: true });
  }

  /* One figure of the page: drawn when it comes into sight, and again when what it shows has changed. */
  class Plot {
    constructor(node, subject, view) {
      Object.assign(this, { node, subject, view, set: {}, stale: true, near: false, seen: false });
      this.at = node.querySelector(".plot");
      this.rests = 0;
      new IntersectionObserver(([entry]) => { this.seen = entry.isIntersecting; }).observe(node);
      new IntersectionObserver(([entry]) => { this.near = entry.isIntersecting; this.refresh(); }, { rootMargin: "300px" }).observe(node);
    }
    refresh(force = false) {
      if (!this.stale || !(force || this.near)) return;
      this.stale = false;
      const begin = performance.now(), view = { ...this.view(), set: this.set, width: this.at.clientWidth || 900 };
      const made = Figures[this.node.dataset.figure](this.subject, view), lacking = typeof made === "string";
      const { height } = this.node.dataset;
      if (height && !lacking) Object.assign(made.layout, { height: Number(height), margin: { ...Figures.MARGIN, t: 8 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom" } });
      this.at.classList.toggle("lacking", lacking);
      this.node.querySelector("[data-caption]").innerHTML = ""; // and text alone goes in
      if (lacking) {
        if (this.drawn) Plotly.purge(this.at);
        this.drawn = false;
        this.at.textContent = `Not drawn: ${made}.`;
        return;
      }
      if (!this.drawn) this.at.textContent = "";
      this.drawn = true;
      this.node.querySelector("[data-caption]").textContent = made.caption.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
      this.controls(made.controls || []);
      Plotly.react(this.at, made.data, made.layout, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "sendChartToCloud"] });
      this.rests = performance.now() + RESTS * (performance.now() - begin);
    }
    controls(list) {
      const at = this.node.querySelector("[data-controls]"), shape = JSON.stringify(list.map((one) => ({ ...one, value: null })));
      if (this.shape === shape) return;
      this.shape = shape;
      const focused = document.activeElement && at.contains(document.activeElement) ? document.activeElement.name : null;
      at.replaceChildren(...list.filter((one) => one.options.length > 1).map((one) => {
        if (one.many) return this.boxes(one);
        const select = element("select", { name: one.name });
        for (const [value, text] of one.options) select.append(element("option", { value, textContent: text, selected: value === one.value }));
        select.addEventListener("change", () => { this.set[one.name] = select.value; this.change(); });
        return element("label", {}, one.title || one.name, select);
      }));
      if (focused) at.querySelector(`[name="${focused}"]`)?.focus();
    }
    /* A choice of several: the figure shows those that are checked. */
    boxes(one) {
      const group = element("span", { className: "controls", role: "group", ariaLabel: one.title });
      group.append(...one.options.map(([value, text]) => element("label", {}, element("input", { type: "checkbox", name: one.name, value, checked: one.value.includes(value) }), text)));
      group.addEventListener("change", () => {
        this.set[one.name] = [...group.querySelectorAll("input:checked")].map((box) => box.value);
        this.change();
      });
      return group;
    }
    change() { this.stale = true; this.refresh(true); }
  }

  /* One study: which trials are shown and marked, its table and its figures. */
  class Study {
    constructor(node, report) {
      Object.assign(this, { node, report, marked: new Set(), read: new Set(), order: null, rows: ROWS });
      this.fetches = new Map();
      this.hidden = new Set();
      this.plots = [...node.querySelectorAll("[data-figure]")].map((one) => new Plot(one, report, () => this.view()));
      this.filterForm();
      this.measure();
      if (live && report.state === "running") this.order = { path: "trial", down: true }; // so that what comes is seen
      this.filter();
    }
    view() {
      const need = live ? (metric, along) => this.need(metric, along) : null;
      return { colour: colours(), face: face(), shown: this.shown, marked: this.marked, need };
    }
    /* What follows from the report, and may have changed with it. */
    measure() {
      this.count = this.report.trials.number.length;
      this.columns = this.tableColumns();
      this.filterChoices();
    }
    /* Take in a part of a report that is newer, or the whole of one. */
    merge(part) {
      const { trials: t, curves } = this.report, row = new Map(t.number.map((n, i) => [n, i])); // a removed trial has none
      for (const n of part.trials?.number ?? []) if (!row.has(n)) row.set(n, row.size);
      const grown = row.size;
      for (const name of ["state", "status", "counts", "removed"]) this.report[name] = part[name];
      const into = (columns, from) => {
        for (const [name, column] of Object.entries(from)) {
          if (!Array.isArray(column)) { into(columns[name] ??= {}, column); continue; }
          if (name === "searched") continue;
          const all = columns[name] ??= [];
          while (all.length < grown) all.push(null);
          part.trials.number.forEach((number, k) => { all[row.get(number)] = column[k]; });
        }
      };
      if (part.trials) {
        into(t, part.trials);
        t.searched.push(...part.trials.searched.filter((path) => !t.searched.includes(path)));
        for (const all of [t.place, t.front, ...Object.values(t.settings), ...Object.values(t.held_out)]) while (all.length < grown) all.push(null);
        for (const [metric, lines] of Object.entries(part.curves.lines)) {
          for (const [number, [grid, values]] of Object.entries(lines)) (curves.lines[metric] ??= {})[number] = [part.curves.grids[grid], values];
        }
      }
      for (const [name, places] of Object.entries(part.places || {})) t[name] = t.number.map((n) => places[n] ?? null);
      this.changed();
    }
    renew(report) {
      report.curves.fetched = this.report.curves.fetched;
      Object.assign(this.report, report);
      this.changed();
    }
    changed() {
      this.measure();
      this.apply();
      this.redraw(() => true, true);
    }
    /* Curves that the page does not hold are asked for, and again when they are old and something has changed. */
    async need(metric, along) {
      const key = `${along} ${metric}`, last = this.fetches.get(key), t = performance.now();
      if (last && (last.pending || t < last.until)) return;
      this.fetches.set(key, { pending: true });
      const answer = await fetch(`curves?${new URLSearchParams({ metric, along })}`);
      if (answer.ok) {
        (this.report.curves.fetched ??= {})[key] = await answer.json();
        for (const plot of this.plots) if (plot.near) plot.change();
      }
      this.fetches.set(key, { until: performance.now() + Math.max(FRESH, 20 * (performance.now() - t)) });
    }
    tableColumns() {
      const t = this.report.trials, found = [["trial", t.number], ["state", t.state]], error = (metric) => this.report.sure.noise[metric]?.deviation;
      for (const [metric, column] of Object.entries(t.values)) found.push([metric, column, metric, error(metric)]);
      for (const [metric, column] of Object.entries(t.held_out)) found.push([`${metric}, held out`, column, undefined, error(metric)]);
      found.push(["epoch", t.epoch], ["seconds", t.seconds], ["why", t.why]);
      for (const [key, column] of Object.entries(t.tags)) found.push([`tag ${key}`, column]);
      for (const path of Figures.byImportance(this.report)) found.push([label(this.report, path), t.settings[path], path, undefined, this.report.importances.dimensions[path]?.log]);
      for (const path of Object.keys(t.settings)) if (!t.searched.includes(path)) found.push([path, t.settings[path], path]);
      return found.map(([name, values, path, noise, log]) => ({ name, values, path: path || name, written: Figures.written(values, noise, log),
        used: values.some((v) => v !== null && v !== ""), numeric: values.every((v) => v === null || typeof v === "number") }));
    }
    filterForm() {
      const form = this.node.querySelector("[data-filter]");
      this.states = element("span", { className: "controls" });
      this.states.addEventListener("input", ({ target }) => this.hidden[target.checked ? "delete" : "add"](target.value));
      this.column = element("select", { name: "column" });
      this.from = element("input", { type: "text", name: "from", autocomplete: "off" });
      this.to = element("input", { type: "text", name: "to", autocomplete: "off" });
      form.append(this.states, element("label", {}, "where", this.column), element("label", {}, "at least, or with the text", this.from), element("label", {}, "at most", this.to));
      form.addEventListener("input", () => this.filter());
      form.addEventListener("submit", (event) => event.preventDefault());
    }
    filterChoices() {
      const { counts } = this.report, choices = JSON.stringify([counts, this.columns.map((one) => one.path)]);
      if (choices === this.choices) return;
      this.choices = choices;
      const chosen = this.column.value || "trial";
      keepFocus(this.node.querySelector("[data-filter]"), () => {
        this.states.replaceChildren(...STATES.filter((state) => counts[state]).map((state) => {
          const box = element("input", { type: "checkbox", name: "state", value: state, checked: !this.hidden.has(state) });
          return element("label", {}, box, `${state} (${counts[state]})`);
        }));
        this.column.replaceChildren(...this.columns.map((one) => element("option", { value: one.path, textContent: one.path })));
        this.column.value = chosen;
      });
    }
    filter() {
      this.rows = ROWS;
      this.apply();
      this.redraw(ofShown);
    }
    apply() {
      if (this.shown?.length !== this.count) this.shown = new Uint8Array(this.count);
      const { values: column, numeric: numbers } = this.columns.find((one) => one.path === this.column.value);
      const t = this.report.trials, from = this.from.value.trim(), to = this.to.value.trim();
      const least = Number(from || NaN), most = Number(to || NaN), word = from.toLowerCase();
      this.from.setCustomValidity(numbers && from && isNaN(least) ? "a number" : "");
      this.to.setCustomValidity(to && isNaN(most) ? "a number" : "");
      const wrong = !this.from.validity.valid || !this.to.validity.valid;
      for (let i = 0; i < this.count; i++) {
        const value = column[i], numeric = typeof value === "number";
        const inside = wrong ? false : !(from || to) || (numeric ? !(value < least) && !(value > most) : value !== null && String(value).toLowerCase().includes(word));
        this.shown[i] = !this.hidden.has(t.state[i]) && inside ? 1 : 0;
      }
      this.table();
    }
    /* The table answers at once; the figures follow one by one, so that the page stays awake, those in sight first. What
       nobody has asked for waits until a figure has rested. */
    redraw(concerns, unasked = false) {
      for (const plot of this.plots) plot.stale ||= concerns(plot.node.dataset.figure);
      const next = () => {
        const plots = this.plots.filter((one) => one.stale && one.near).sort((a, b) => b.seen - a.seen), now = performance.now();
        const plot = plots.find((one) => !unasked || one.rests <= now);
        plot?.refresh();
        if (plots.length) this.timer = setTimeout(next, plot ? 0 : 250);
      };
      clearTimeout(this.timer);
      this.timer = setTimeout(next);
    }
    sorted() {
      const t = this.report.trials, list = Figures.byPlace(this.report, Figures.indices(this.report, this));
      if (!this.order) return list;
      const { path, down } = this.order, values = this.columns.find((one) => one.path === path).values;
      const rank = (v) => v === null || v === undefined || v === "" ? 2 : typeof v === "number" ? 0 : 1;
      return list.sort((a, b) => {
        const x = values[a], y = values[b];
        if (rank(x) !== rank(y)) return rank(x) - rank(y);
        return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1) || t.number[a] - t.number[b];
      });
    }
    table() {
      const table = this.node.querySelector("[data-table]"), list = this.sorted(), used = this.columns.filter((one) => one.used);
      const heads = used.map((one) => {
        const button = element("button", { type: "button", textContent: one.name, title: one.path });
        const down = this.order?.path === one.path ? this.order.down : null;
        const best = this.report.objectives.some((o) => o.metric === one.path && o.direction === "maximize");
        button.addEventListener("click", () => { this.order = { path: one.path, down: down === null ? best : !down }; this.table(); });
        const head = element("th", { scope: "col", className: one.numeric ? "number" : "" }, button);
        head.dataset.name = one.name; // for paper: of a heading on its next page no button is printed
        if (down !== null) head.setAttribute("aria-sort", down ? "descending" : "ascending");
        return head;
      });
      keepFocus(table, () => {
        table.tHead.replaceChildren(element("tr", {}, element("th", { scope: "col", textContent: "mark" }), ...heads));
        table.tBodies[0].replaceChildren(...list.slice(0, this.rows).map((i) => this.row(i, used)));
      });
      const count = this.node.querySelector("[data-count]");
      count.replaceChildren(`${list.length} of ${this.count} trials${list.length > this.rows ? `, the first ${this.rows} of them below ` : ""}`);
      if (list.length > this.rows) {
        const more = element("button", { type: "button", textContent: "show more" });
        more.addEventListener("click", () => { this.rows += 5 * ROWS; this.table(); });
        count.append(more);
      }
    }
    row(i, used) {
      const box = element("input", { type: "checkbox", checked: this.marked.has(i), ariaLabel: `mark trial ${this.report.trials.number[i]}` });
      box.addEventListener("change", () => { this.marked[box.checked ? "add" : "delete"](i); this.differences(); this.redraw(ofMarks); });
      return element("tr", { className: i === Figures.winner(this.report) ? "winner" : "" }, element("td", {}, box), ...used.map((one) => {
        const text = one.written(one.values[i]), cell = element(one.path === "trial" ? "th" : "td", { className: one.numeric ? "number" : "", title: text.length > 30 ? text : "" });
        if (one.path === "trial") cell.scope = "row";
        cell.append(live && one.path === "trial" ? element("a", { href: `trial/${text}/`, textContent: text })
          : one.path === "why" && text ? this.why(i, text) : element("bdi", { textContent: text }));
        return cell;
      }));
    }
    /* A reason in one line, and in full once it is pressed. */
    why(i, text) {
      const number = this.report.trials.number[i], shows = (full) => button.setAttribute("aria-expanded", full);
      const button = element("button", { type: "button", className: "why", ariaLabel: `why trial ${number} ended: ${text}` }, element("bdi", { textContent: text }));
      button.addEventListener("click", () => { this.read[this.read.has(number) ? "delete" : "add"](number); shows(this.read.has(number)); });
      shows(this.read.has(number));
      return button;
    }
    differences() {
      const table = this.node.querySelector("[data-differences]"), list = [...this.marked], t = this.report.trials, first = Figures.winner(this.report);
      if (list.length === 1 && first >= 0 && first !== list[0]) list.push(first); // one alone is compared with the answer
      table.tHead.replaceChildren();
      table.tBodies[0].replaceChildren();
      if (!list.length) return;
      table.tHead.append(element("tr", {}, element("th", { scope: "col", textContent: "setting" }),
        ...list.map((i) => element("th", { scope: "col", textContent: `trial ${t.number[i]}${i === first ? ", the answer" : ""}` }))));
      const paths = Object.keys(t.settings).filter((path) => list.length === 1 || new Set(list.map((i) => t.settings[path][i])).size > 1);
      const rows = [...Object.entries(t.values), ...paths.map((path) => [path, t.settings[path]])];
      const form = (path) => this.columns.find((one) => one.path === path)?.written || figure;
      table.tBodies[0].append(...rows.map(([name, column]) => element("tr", {}, element("th", { scope: "row", textContent: name }),
        ...list.map((i) => element("td", { className: typeof column[i] === "number" ? "number" : "" }, element("bdi", { textContent: form(name)(column[i]) }))))));
    }
  }

  function redrawAll(force) {
    for (const page of pages) for (const plot of page.plots) { plot.stale = true; plot.refresh(force || plot.drawn); }
  }
  /* Figures of all that the page has: of the studies side by side, or of a trial. */
  class Whole {
    constructor(nodes, subject) {
      this.subject = subject;
      this.plots = nodes.map((node) => new Plot(node, subject, () => ({ colour: colours(), face: face() })));
    }
    renew(subject) {
      Object.assign(this.subject, subject);
      for (const plot of this.plots) { plot.stale = true; plot.refresh(); }
    }
  }
  function show(reports) {
    const whole = [...document.querySelectorAll("main > section [data-figure]")];
    if (whole.length) pages.push(new Whole(whole, reports));
    for (const node of document.querySelectorAll("[data-study]")) pages.push(new Study(node, reports[node.dataset.study]));
    document.documentElement.dataset.ready = "true";
    document.dispatchEvent(new Event("ready"));
  }
  document.addEventListener("click", async (event) => {
    if (!event.target.matches?.("[data-copy]")) return;
    const code = event.target.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      event.target.textContent = "copied";
    } catch { // no clipboard in a page from a file: it is left selected
      getSelection().selectAllChildren(code);
    }
  });
  dark.addEventListener("change", () => redrawAll(false));
  print.addEventListener("change", () => redrawAll(true));
  addEventListener("beforeprint", () => redrawAll(true));

  /* Plotly begins after the first paint: it takes longer than all the rest. In a file its text is one that the policy
     names. */
  function begin() {
    const later = document.querySelector("[data-later]"), script = element("script");
    const start = () => show(JSON.parse(document.getElementById("report-data").textContent));
    if (later.href) Object.assign(script, { src: later.href, onload: start });
    else script.textContent = later.textContent;
    document.head.append(script);
    if (!later.href) start();
  }
  if (document.hidden) setTimeout(begin);
  else requestAnimationFrame(() => setTimeout(begin));
  return { pages, redrawAll, element };
})();
