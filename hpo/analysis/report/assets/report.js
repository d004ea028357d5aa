"use strict";
/* Brings a report's page to life: figures where they come into sight, filters, marked trials, light and dark. */
const Report = (() => {
  const ROWS = 100, { STATES, figure, label, safe } = Figures;
  const COLOURS = ["paper", "ink", "soft", "line", "chosen", ...STATES];
  const dark = matchMedia("(prefers-color-scheme: dark)"), print = matchMedia("print");
  const pages = [];

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  function colours() {
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  /* One figure of the page: drawn when it comes into sight, and again when what it shows has changed. */
  class Plot {
    constructor(node, subject, view) {
      Object.assign(this, { node, subject, view, set: {}, stale: true, seen: false });
      this.at = node.querySelector(".plot");
      new IntersectionObserver(([entry]) => { this.seen = entry.isIntersecting; this.refresh(); }, { rootMargin: "300px" }).observe(node);
    }
    refresh(force = false) {
      if (!this.stale || !(force || this.seen)) return;
      this.stale = false;
      const view = { ...this.view(), set: this.set, width: this.at.clientWidth || 900 };
      const made = Figures[this.node.dataset.figure](this.subject, view), lacking = typeof made === "string";
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
      Plotly.react(this.at, made.data, made.layout, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"] });
    }
    controls(list) {
      const at = this.node.querySelector("[data-controls]"), shape = JSON.stringify(list.map((one) => ({ ...one, value: null })));
      if (this.shape === shape) return;
      this.shape = shape;
      const focused = document.activeElement && at.contains(document.activeElement) ? document.activeElement.name : null;
      at.replaceChildren(...list.filter((one) => one.options.length > 1).map((one) => {
        const select = element("select", { name: one.name });
        for (const [value, text] of one.options) select.append(element("option", { value, textContent: text, selected: value === one.value }));
        select.addEventListener("change", () => { this.set[one.name] = select.value; this.change(); });
        return element("label", {}, one.title || one.name, select);
      }));
      if (focused) at.querySelector(`[name="${focused}"]`)?.focus();
    }
    change() { this.stale = true; this.refresh(true); }
  }

  /* One study: which trials are shown and marked, its table and its figures. */
  class Study {
    constructor(node, report) {
      Object.assign(this, { node, report, marked: new Set(), order: null, rows: ROWS });
      this.count = report.trials.number.length;
      this.shown = new Uint8Array(this.count).fill(1);
      this.columns = this.tableColumns();
      this.plots = [...node.querySelectorAll("[data-figure]")].map((one) => new Plot(one, report, () => this.view()));
      this.filterForm();
      this.table();
    }
    view() { return { colour: colours(), shown: this.shown, marked: this.marked }; }
    tableColumns() {
      const t = this.report.trials, found = [["trial", t.number], ["state", t.state]];
      for (const [metric, column] of Object.entries(t.values)) found.push([metric, column]);
      for (const [metric, column] of Object.entries(t.held_out)) found.push([`${metric}, held out`, column]);
      found.push(["epoch", t.epoch], ["seconds", t.seconds]);
      for (const [key, column] of Object.entries(t.tags)) found.push([`tag ${key}`, column]);
      for (const path of t.searched) found.push([label(this.report, path), t.settings[path], path]);
      for (const path of Object.keys(t.settings)) if (!t.searched.includes(path)) found.push([path, t.settings[path], path]);
      found.push(["why", t.why]);
      return found.map(([name, values, path]) => ({ name, values, path: path || name,
        used: values.some((v) => v !== null && v !== ""), numeric: values.every((v) => v === null || typeof v === "number") }));
    }
    filterForm() {
      const form = this.node.querySelector("[data-filter]");
      this.states = STATES.filter((state) => this.report.counts[state]).map((state) => {
        const box = element("input", { type: "checkbox", name: "state", value: state, checked: true });
        form.append(element("label", {}, box, `${state} (${this.report.counts[state]})`));
        return box;
      });
      this.column = element("select", { name: "column" }, ...this.columns.map((one, k) => element("option", { value: k, textContent: one.path })));
      this.from = element("input", { type: "text", name: "from", autocomplete: "off" });
      this.to = element("input", { type: "text", name: "to", autocomplete: "off" });
      form.append(element("label", {}, "where", this.column), element("label", {}, "from, or with", this.from), element("label", {}, "to", this.to));
      form.addEventListener("input", () => this.filter());
      form.addEventListener("submit", (event) => event.preventDefault());
    }
    filter() {
      const t = this.report.trials, states = new Set(this.states.filter((box) => box.checked).map((box) => box.value));
      const column = this.columns[this.column.value].values, from = this.from.value.trim(), to = this.to.value.trim();
      const least = Number(from || NaN), most = Number(to || NaN), word = from.toLowerCase();
      for (let i = 0; i < this.count; i++) {
        const value = column[i], numeric = typeof value === "number";
        const inside = !(from || to) || (numeric ? !(value < least) && !(value > most) : value !== null && String(value).toLowerCase().includes(word));
        this.shown[i] = states.has(t.state[i]) && inside ? 1 : 0;
      }
      this.rows = ROWS;
      this.table();
      this.redraw();
    }
    redraw() { // the table answers at once; the figures in sight follow one by one, so that the page stays awake
      for (const plot of this.plots) plot.stale = true;
      const next = () => {
        const plot = this.plots.find((one) => one.stale && one.seen);
        if (plot) {
          plot.refresh();
          this.timer = setTimeout(next);
        }
      };
      clearTimeout(this.timer);
      this.timer = setTimeout(next);
    }
    sorted() {
      const t = this.report.trials, list = Figures.byPlace(this.report, Figures.indices(this.report, this));
      if (!this.order) return list;
      const { column, down } = this.order, values = column.values;
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
        const down = this.order?.column === one ? this.order.down : null;
        button.addEventListener("click", () => { this.order = { column: one, down: down === false }; this.table(); });
        const head = element("th", { scope: "col", className: one.numeric ? "number" : "" }, button);
        if (down !== null) head.setAttribute("aria-sort", down ? "descending" : "ascending");
        return head;
      });
      table.tHead.replaceChildren(element("tr", {}, element("th", { scope: "col", textContent: "mark" }), ...heads));
      table.tBodies[0].replaceChildren(...list.slice(0, this.rows).map((i) => this.row(i, used)));
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
      box.addEventListener("change", () => { this.marked[box.checked ? "add" : "delete"](i); this.differences(); this.redraw(); });
      return element("tr", {}, element("td", {}, box), ...used.map((one) => {
        const text = figure(one.values[i]);
        return element("td", { className: one.numeric ? "number" : "", title: text.length > 30 ? text : "" }, element("bdi", { textContent: text }));
      }));
    }
    differences() {
      const table = this.node.querySelector("[data-differences]"), list = [...this.marked], t = this.report.trials;
      table.tHead.replaceChildren();
      table.tBodies[0].replaceChildren();
      if (!list.length) return;
      table.tHead.append(element("tr", {}, element("th", { scope: "col", textContent: "setting" }),
        ...list.map((i) => element("th", { scope: "col", textContent: `trial ${t.number[i]}` }))));
      const paths = Object.keys(t.settings).filter((path) => list.length === 1 || new Set(list.map((i) => t.settings[path][i])).size > 1);
      const rows = [...Object.entries(t.values), ...paths.map((path) => [path, t.settings[path]])];
      table.tBodies[0].append(...rows.map(([name, column]) => element("tr", {}, element("th", { scope: "row", textContent: name }),
        ...list.map((i) => element("td", {}, element("bdi", { textContent: figure(column[i]) }))))));
    }
  }

  function redrawAll(force) {
    for (const page of pages) for (const plot of page.plots) { plot.stale = true; plot.refresh(force || plot.drawn); }
  }
  function show(reports) {
    const whole = document.querySelector("main > section [data-figure]");
    if (whole) pages.push({ plots: [new Plot(whole, reports, () => ({ colour: colours() }))] });
    for (const node of document.querySelectorAll("[data-study]")) pages.push(new Study(node, reports[node.dataset.study]));
    document.documentElement.dataset.ready = "true";
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

  /* In a file plotly begins after the first paint: it takes longer than all the rest. Its text is one that the policy
     names. */
  function begin() {
    const later = document.querySelector("script[data-later]");
    if (later) document.head.append(element("script", { textContent: later.textContent }));
    show(JSON.parse(document.getElementById("report-data").textContent));
  }
  if (document.hidden) setTimeout(begin);
  else requestAnimationFrame(() => setTimeout(begin));
  return { pages, redrawAll };
})();
