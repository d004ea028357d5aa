"use strict";
/* Figures of a report: functions of (report, view) to plotly's {data, layout, caption}, or a text that says why there is
   none. A view has the colours, the trials that are shown, those that are marked, the width and what controls are set to.

   Plotly reads texts as a little HTML, so names and values go through `safe`. */
const Figures = (() => {
  const MOST_LINES = 500, MOST_POINTS = 2000, MOST_AXES = 8, MOST_SLICES = 6, MOST_BANDS = 3, BINS = 3, GRID = 40, REACH = 0.1;
  const MARGIN = { l: 84, r: 44, t: 34, b: 56 }; // the toolbar stands to the right, where no legend is
  const STATES = ["complete", "pruned", "running", "paused", "infeasible", "failed", "waiting"];
  const SYMBOLS = { complete: "circle", pruned: "x-thin-open", running: "triangle-up", paused: "square-open",
    infeasible: "diamond-open", failed: "cross-thin-open", waiting: "circle-open" };
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];

  const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const figure = (value) => value === null || value === undefined ? "" : typeof value !== "number" ? String(value)
    : Number.isInteger(value) && Math.abs(value) < 1e6 ? String(value) : String(Number(value.toPrecision(4)));
  /* How a column of numbers is written, so that its figures stand below each other: to the second digit of their error
     where that is known, else to four digits of a usual one; with exponents where most of them span four powers of ten, or two on a logarithmic scale. */
  function written(values, error, log = false) {
    const sizes = values.filter((v) => typeof v === "number" && v !== 0).map(Math.abs).sort((a, b) => a - b);
    const [least, usual, most] = [0.05, 0.5, 0.95].map((share) => quantile(sizes, share));
    const digits = (size, count) => Math.min(12, Math.max(0, count - 1 - Math.floor(Math.log10(size))));
    if (!sizes.length || values.every((v) => typeof v !== "number" || Number.isInteger(v)) && most < 1e6) return figure;
    const form = error ? (v) => v.toFixed(digits(error, 2)) : most >= (log ? 100 : 1e4) * least || most >= 1e6 ? (v) => v.toExponential(2) : (v) => v.toFixed(digits(usual, 4));
    return (v) => typeof v === "number" ? form(v) : figure(v);
  }
  /* The place of the trial that the page names as the answer, or -1: by other seeds where the best were trained again. */
  function winner(report) {
    if (report.objectives.length > 1) return -1;
    const { answer, trials: t } = report, first = t.place.indexOf(0);
    return answer.seeds && answer.best.length === 1 ? t.number.indexOf(answer.best[0].number) : first;
  }
  /* The clock of the study: seconds since the first trial began, without the times in which no attempt ran. */
  function clock(report) {
    const { begin, end } = report.timeline.breaks, out = begin.reduce((sum, from, k) => sum + end[k] - from, 0);
    const at = (t) => t === null ? null : t - begin.reduce((sum, from, k) => sum + Math.max(0, Math.min(t, end[k]) - from), 0);
    const title = (unit) => `${unit} since the first trial began${begin.length ? ", without pauses" : ""}`;
    return { at, begin, out, title, said: begin.length ? ` ${begin.length === 1 ? "A pause" : `${begin.length} pauses`} of ${lasting(out)}, in which no trial ran, ${begin.length === 1 ? "is" : "are"} left out.` : "" };
  }
  const lasting = (seconds) => { const [unit, size] = timeUnit(seconds); return `${figure(Number((seconds / size).toPrecision(2)))} ${unit}`; };
  const better = (report, place = 0) => report.objectives[place].direction === "minimize" ? "less" : "more";
  const titled = (report, place = 0) => `${safe(report.objectives[place].metric)} (${better(report, place)} is better)`;
  const label = (report, path) => (report.importances.dimensions[path] || { label: path }).label;
  const indices = (report, view) => report.trials.number.map((_, i) => i).filter((i) => view.shown[i]);

  function spread(list, most, first = 0) { // the first ones, the others evenly
    if (list.length <= most) return list;
    const rest = list.slice(first), count = most - first;
    return [...list.slice(0, first), ...Array.from({ length: count }, (_, i) => rest[Math.floor(i * rest.length / count)])];
  }
  function byPlace(report, list) {
    const place = (i) => report.trials.place[i] === null ? Infinity : report.trials.place[i];
    return [...list].sort((a, b) => place(a) - place(b) || a - b);
  }
  function quantile(sorted, share) {
    return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : NaN;
  }
  /* A range that far outliers do not squeeze the others in, and how many values it leaves out. */
  function robust(values) {
    const sorted = values.filter((v) => v !== null && Number.isFinite(v)).sort((a, b) => a - b);
    if (sorted.length < 8) return { range: null, beyond: 0 };
    const low = quantile(sorted, 0.1), high = quantile(sorted, 0.9), span = high - low;
    const least = sorted[0], most = sorted[sorted.length - 1];
    if (!(span > 0) || most - least <= 8 * span) return { range: null, beyond: 0 };
    const range = [Math.max(least, low - 2 * span), Math.min(most, high + 2 * span)];
    const margin = 0.05 * (range[1] - range[0]);
    return { range: [range[0] - margin, range[1] + margin], beyond: sorted.filter((v) => v < range[0] || v > range[1]).length };
  }
  const left = (count) => count ? ` ${count} values lie outside of what is drawn.` : "";
  /* Only names may need a wider margin: to find one out plotly draws a figure twice. */
  function axis(view, title, more = {}) {
    return { title: { text: title, standoff: 8 }, automargin: more.type === "category", gridcolor: view.colour.line, zeroline: false,
      linecolor: view.colour.line, exponentformat: "e", ...more };
  }
  /* Whole ticks of an axis of few epochs. */
  const counted = (along, most) => along === "epoch" && most <= 12 ? { dtick: 1 } : {};
  function layout(view, x, y, more = {}) {
    return { height: 420, margin: MARGIN, paper_bgcolor: view.colour.paper,
      plot_bgcolor: view.colour.paper, font: { color: view.colour.ink, size: 13, family: view.face }, hovermode: "closest",
      legend: { orientation: "h", y: -0.2, yanchor: "top" }, modebar: { orientation: "v" }, xaxis: x, yaxis: y, ...more };
  }
  function timeUnit(seconds) {
    return seconds > 7200 ? ["hours", 3600] : seconds > 120 ? ["minutes", 60] : ["seconds", 1];
  }

  /* --- Curves */

  function rung(report, i) {
    const t = report.trials, state = t.state[i];
    return state === "pruned" ? `pruned at epoch ${t.epoch[i]}` : state;
  }
  /* The curves that a figure is of: of a metric, over epochs or time. A live page asks for those that it does not hold. */
  function source(report, view, timed = true) {
    const c = report.curves, known = c.known || c.metrics;
    const metric = known.includes(view.set.metric) ? view.set.metric : c.metrics[0] || known[0];
    if (!metric) return null;
    const along = timed && view.set.along === "time" ? "time" : c.axis, held = along === c.axis && c.lines[metric];
    if (!held && view.need) view.need(metric, along);
    const lines = held || (c.fetched || {})[`${along} ${metric}`] || {};
    const [unit, size] = along === "time" ? timeUnit(Math.max(0, ...Object.values(lines).map(([x]) => x[x.length - 1]))) : [c.axis, 1];
    const controls = [{ name: "metric", options: known.map((m) => [m, m]), value: metric }];
    if (timed && view.need) controls.push({ name: "along", title: "over", options: [[c.axis, c.axis], ["time", "time"]], value: along });
    return { metric, lines, size, title: along === "time" ? `${unit} since the trial began` : c.axis, controls };
  }
  function line(report, of, i) {
    const found = of.lines[report.trials.number[i]];
    if (!found) return null;
    const grid = typeof found[0] === "number" ? report.curves.grids[found[0]] : found[0];
    return [of.size === 1 ? grid : grid.map((x) => x / of.size), found[1]];
  }
  /* Many curves as one trace with gaps: plotly draws a thousand traces a hundred times slower than one. */
  function bundle(report, of, list, name, style) {
    const x = [], y = [], text = [], dots = { x: [], y: [], text: [] };
    for (const i of list) {
      const points = line(report, of, i);
      if (!points) continue;
      const into = points[0].length === 1 ? dots : { x, y, text };
      points[0].forEach((at, k) => { into.x.push(at); into.y.push(points[1][k]); into.text.push(report.trials.number[i]); });
      if (into !== dots) { x.push(null); y.push(null); text.push(""); }
    }
    const hover = { hovertemplate: `trial %{text}: %{y:.5g} at %{x:.4~g} ${of.title}<extra>${safe(name)}</extra>` };
    const traces = [];
    if (x.length) traces.push({ type: "scatter", mode: "lines", x, y, text, name, legendgroup: name, line: style, ...hover });
    if (dots.x.length) traces.push({ type: "scatter", mode: "markers", ...dots, name, legendgroup: name,
      showlegend: !x.length, marker: { color: style.color, size: 5, symbol: "x-thin-open", line: { width: 1.5 } }, ...hover });
    return traces;
  }
  function rungs(report, list) { // name -> trials, stopped ones by their epoch, at most five groups of them
    const epochs = [...new Set(list.filter((i) => report.trials.state[i] === "pruned").map((i) => report.trials.epoch[i]))];
    epochs.sort((a, b) => a - b);
    const ends = epochs.length <= 5 ? epochs : [0.2, 0.4, 0.6, 0.8, 1].map((s) => epochs[Math.ceil(s * epochs.length) - 1]);
    const groups = new Map();
    for (const i of list) {
      let name = rung(report, i), order = STATES.indexOf(report.trials.state[i]) * 1e9;
      if (report.trials.state[i] === "pruned") {
        const k = ends.findIndex((end) => report.trials.epoch[i] <= end), from = k ? ends[k - 1] + 1 : epochs[0];
        if (epochs.length > 5 && from < ends[k]) name = `pruned at epochs ${from} to ${ends[k]}`;
        order += k;
      }
      if (!groups.has(name)) groups.set(name, { order, list: [], k: order % 1e9, state: report.trials.state[i] });
      groups.get(name).list.push(i);
    }
    return [...groups].sort((a, b) => a[1].order - b[1].order);
  }
  function curves(report, view) {
    const of = source(report, view);
    if (!of) return "no trial has reported a metric yet";
    const all = byPlace(report, indices(report, view)).filter((i) => of.lines[report.trials.number[i]]);
    if (!all.length) return "no trial that is shown has a curve of it";
    const list = spread(all, MOST_LINES, 100), data = [], close = view.set.range === "best";
    for (const [name, group] of rungs(report, list)) {
      const width = group.list.length > 50 ? 0.6 : 1.4;
      data.push(...bundle(report, of, group.list, name, { color: view.colour[group.state], width,
        dash: group.state === "complete" ? "solid" : DASHES[1 + group.k % (DASHES.length - 1)] }));
    }
    const best = winner(report);
    if (all.includes(best)) data.push(...bundle(report, of, [best], `the answer, trial ${report.trials.number[best]}`, { color: view.colour.ink, width: 3 }));
    const shown = close ? nearBest(report, of, all) : robust(list.flatMap((i) => line(report, of, i)[1])), y = axis(view, safe(of.metric), shown.range ? { range: shown.range } : {});
    const some = list.length < all.length ? ` ${list.length} of ${all.length} are drawn: the best 100, and others evenly.` : "";
    const kept = report.curves.kept < report.curves.of ? ` The page holds the curves of ${report.curves.kept} trials of ${report.curves.of}.` : "";
    const thin = report.curves.thinned ? " Long curves have lost points, never their ends and extremes." : "";
    const most = Math.max(0, ...list.map((i) => line(report, of, i)[0].at(-1)));
    return { data: [...data, ...marked(report, view, of)], layout: layout(view, axis(view, of.title, counted(of.title, most)), y),
      caption: `A line for each trial, dashed where it is not complete.${some}${kept}${thin}${left(shown.beyond)}`,
      controls: [...of.controls, { name: "range", options: [["all", "of all trials"], ["best", "of the best quarter"]], value: close ? "best" : "all" }] };
  }
  function nearBest(report, of, shown) { // what the best quarter of those with a place came to in the later half
    const list = shown.filter((i) => Number.isInteger(report.trials.place[i]));
    const values = list.slice(0, Math.ceil(list.length / 4)).flatMap((i) => line(report, of, i)[1].slice(line(report, of, i)[1].length >> 1));
    const known = values.filter((v) => v !== null), least = Math.min(...known), most = Math.max(...known), margin = 0.1 * (most - least);
    return { range: margin > 0 ? [least - margin, most + margin] : null, beyond: 0 };
  }
  function marked(report, view, of) {
    return [...view.marked].filter((i) => of.lines[report.trials.number[i]]).flatMap((i, k) =>
      bundle(report, of, [i], `trial ${report.trials.number[i]}`, { color: view.colour.chosen, width: 3,
        dash: DASHES[k % DASHES.length] }));
  }
  function chosen(report, view) { // one alone is drawn beside the answer
    if (!view.marked.size) return "mark trials in the table above";
    const of = source(report, view), data = of ? marked(report, view, of) : [];
    if (!data.length) return "the page holds no curve of the marked trials";
    const best = winner(report), beside = view.marked.size === 1 && best >= 0 && !view.marked.has(best) ? [best] : [];
    const shown = [...beside, ...view.marked].map((i) => line(report, of, i)).filter(Boolean), most = Math.max(0, ...shown.map(([x]) => x.at(-1)));
    const answer = bundle(report, of, beside, `the answer, trial ${report.trials.number[best]}`, { color: view.colour.ink, width: 3 });
    return { data: [...answer, ...data], layout: layout(view, axis(view, of.title, counted(of.title, most)), axis(view, safe(of.metric))), caption: "", controls: of.controls };
  }
  function groups(report, view) {
    const t = report.trials, of = source(report, view, false), list = indices(report, view);
    if (!of) return "no trial has reported a metric yet";
    const shares = Object.keys(report.importances.shares[report.objectives[0].metric] || {}); // the first matters most
    const paths = [...new Set([...shares, ...Object.keys(t.settings)])].filter((p) => new Set(t.settings[p] || []).size > 1);
    const options = [...paths.map((p) => [p, label(report, p)]), ...Object.keys(t.tags).map((k) => [`tag:${k}`, `tag ${k}`]), ["state", "state"]];
    const by = options.some(([p]) => p === view.set.group) ? view.set.group : options[0][0];
    const found = new Map(), sizes = new Map(), name = by.startsWith("tag:") ? grouping(t.tags[by.slice(4)], list, "without it")
      : grouping(by === "state" ? t.state : t.settings[by], list);
    for (const i of list) {
      const points = line(report, of, i), group = name(i);
      if (!points) continue;
      if (!found.has(group)) found.set(group, new Map());
      sizes.set(group, (sizes.get(group) || 0) + 1);
      points[0].forEach((x, k) => {
        if (points[1][k] === null) return;
        const at = found.get(group);
        if (!at.has(x)) at.set(x, []);
        at.get(x).push(points[1][k]);
      });
    }
    if (!found.size) return "no trial that is shown has a curve of it";
    const data = [], names = [...found.keys()].sort((a, b) => parseFloat(a) - parseFloat(b) || (a < b ? -1 : 1));
    names.forEach((group, k) => {
      const xs = [...found.get(group).keys()].sort((a, b) => a - b), all = xs.map((x) => found.get(group).get(x));
      const mean = all.map((v) => v.reduce((a, b) => a + b, 0) / v.length);
      const dev = all.map((v, j) => v.length > 1 ? Math.sqrt(v.reduce((a, b) => a + (b - mean[j]) ** 2, 0) / (v.length - 1)) : 0);
      const colour = view.colour[["complete", "pruned", "running", "infeasible", "failed", "paused"][k % 6]];
      if (k < MOST_BANDS) data.push({ type: "scatter", mode: "lines", x: [...xs, ...[...xs].reverse()], fill: "toself",
        y: [...mean.map((m, j) => m + dev[j]), ...mean.map((m, j) => m - dev[j]).reverse()], fillcolor: colour, opacity: 0.18,
        line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: group });
      data.push({ type: "scatter", mode: xs.length > 1 ? "lines" : "markers", x: xs, y: mean, name: `${safe(group)} (n = ${sizes.get(group)})`,
        legendgroup: group, line: { color: colour, width: 2, dash: DASHES[k % DASHES.length] }, marker: { color: colour },
        text: all.map((v) => v.length), hovertemplate: `%{y:.5g}, mean of %{text} trials<extra>${safe(group)}</extra>` });
    });
    return { data, layout: layout(view, axis(view, of.title), axis(view, safe(of.metric))),
      caption: `The mean of the trials that came so far, by ${safe(options.find(([p]) => p === by)[1])}, and one standard deviation to each side` +
        (names.length > MOST_BANDS ? ` of the first ${MOST_BANDS} groups.` : ".") + " Where trials were pruned, those left are the better ones.",
      controls: [...of.controls, { name: "group", title: "group by", options, value: by }] };
  }
  function grouping(column, list, absent = "not active") { // trial -> its group: the value, or of many numbers a quarter of them
    const values = [...new Set(list.map((i) => column[i]).filter((v) => v !== null && v !== undefined))];
    const numbers = values.every((v) => typeof v === "number");
    if (!numbers || values.length <= 6) return (i) => column[i] === null || column[i] === undefined ? absent : figure(column[i]);
    const sorted = list.map((i) => column[i]).filter((v) => v !== null).sort((a, b) => a - b);
    const ends = Array.from({ length: BINS }, (_, k) => quantile(sorted, (k + 1) / BINS - 1e-9));
    return (i) => {
      if (column[i] === null) return absent;
      const k = Math.max(ends.findIndex((end) => column[i] <= end), 0);
      return `${figure(k ? sorted.find((value) => value > ends[k - 1]) : sorted[0])} to ${figure(ends[k])}`;
    };
  }

  /* The metrics of one trial, those of one name in a panel: val/loss beside train/loss. */
  const SOURCES = { val: "complete", train: "pruned", test: "infeasible" };
  function panels(subject, view, keys, most) {
    const groups = new Map();
    for (const key of keys) {
      const name = key.slice(key.lastIndexOf("/") + 1);
      groups.set(name, [...groups.get(name) || [], key]);
    }
    const axes = ["epoch", "step", "time"].filter((one) => keys.some((key) => subject.curves[key][one])), along = axes.includes(view.set.along) ? view.set.along : axes[0];
    const level = (name) => groups.get(name).every((key) => new Set(Object.values(subject.curves[key])[0][1]).size < 2); // what never changes stands last
    const names = [...groups.keys()].sort((a, b) => level(a) - level(b)), validated = (name) => groups.get(name).some((key) => subject.usual.includes(key));
    const usual = names.filter(validated).slice(0, most), first = usual.length ? usual : names.slice(0, most);
    const picked = names.filter((name) => (view.set.metric || first).includes(name));
    const shown = picked.length ? picked : names.slice(0, 1), columns = view.width > 700 && shown.length > 1 ? 2 : 1, rows = Math.ceil(shown.length / columns);
    const points = (key) => subject.curves[key][along] || [[], []];
    const longest = Math.max(0, ...shown.flatMap((name) => groups.get(name)).map((key) => points(key)[0].at(-1) ?? 0)), [unit, size] = along === "time" ? timeUnit(longest) : [along, 1];
    const data = [], whole = layout(view, {}, {}, { height: 50 + 250 * rows, legend: { orientation: "h", y: 1 + 10 / (250 * rows), yanchor: "bottom" } });
    shown.forEach((name, k) => {
      const id = k ? k + 1 : "", row = Math.floor(k / columns), left = (k % columns) / columns, gap = 44 / (250 * rows);
      groups.get(name).forEach((key, j) => {
        const [x, y] = points(key), color = view.colour[SOURCES[key.split("/")[0]] || "paused"];
        if (x.length) data.push({ type: "scatter", mode: x.length < 60 ? "lines+markers" : "lines", x: x.map((at) => at / size), y, name: safe(key), xaxis: `x${id}`, yaxis: `y${id}`,
          line: { color, width: 1.8, dash: DASHES[j % DASHES.length] }, marker: { color, size: 5 }, hovertemplate: `%{y:.6g} at ${unit} %{x:.4~g}<extra>${safe(key)}</extra>` });
      });
      const last = row === rows - 1 || k + columns >= shown.length;
      whole[`xaxis${id}`] = { ...axis(view, last ? along === "time" ? `${unit} since the trial began` : along : "", counted(along, longest)), anchor: `y${id}`,
        domain: columns > 1 ? [left + (left ? 0.06 : 0), left + 0.5 - (left ? 0 : 0.02)] : [0, 1] };
      whole[`yaxis${id}`] = { ...axis(view, safe(name)), anchor: `x${id}`, domain: [1 - (row + 1) / rows + (row < rows - 1 ? gap : 0), 1 - row / rows - (row ? gap / 2 : 0)] };
    });
    const missing = data.some(({ y }) => y.some((v) => v === null));
    return { data, layout: whole, caption: missing ? "Values that are not finite are left out." : "",
      controls: [{ name: "metric", title: "metrics", many: true, options: names.map((name) => [name, groups.get(name).join(", ")]), value: shown },
        { name: "along", title: "over", options: axes.map((a) => [a, a]), value: along }] };
  }
  function trial(subject, view) {
    const keys = Object.keys(subject.curves).filter((key) => !subject.machine.includes(key));
    return keys.length ? panels(subject, view, keys, 4) : "the trial has reported nothing yet";
  }
  function system(subject, view) {
    return subject.machine.length ? panels(subject, view, subject.machine, 6) : "the trial has reported no figures of its machine";
  }

  /* --- History */

  const XS = [["trial", "trial"], ["epochs", "epochs trained"], ["time", "time"]];
  function along(report, by) { // [trials in order, their place on the axis, its title]
    const t = report.trials, all = t.number.map((_, i) => i);
    if (by === "trial") return [all, t.number, "trial"];
    const ended = all.filter((i) => t.ended[i] !== null).sort((a, b) => t.ended[a] - t.ended[b] || a - b);
    const x = [];
    if (by === "epochs") {
      let sum = 0;
      for (const i of ended) x[i] = sum += t.epoch[i];
      return [ended, x, "epochs trained, over all trials"];
    }
    const { at, title } = clock(report), [unit, size] = timeUnit(Math.max(0, ...ended.slice(-1).map((i) => at(t.ended[i]))));
    for (const i of ended) x[i] = at(t.ended[i]) / size;
    return [ended, x, title(unit)];
  }
  function bestSoFar(report, order, x) {
    const least = report.objectives[0].direction === "minimize", xs = [], ys = [], text = [];
    const values = report.trials.values[report.objectives[0].metric];
    let best = null;
    for (const i of order) {
      if (report.trials.state[i] !== "complete" || values[i] === null) continue;
      if (best === null || (least ? values[i] < best : values[i] > best)) {
        best = values[i];
        xs.push(x[i]); ys.push(best); text.push(report.trials.number[i]);
      }
    }
    if (xs.length) { xs.push(x[order[order.length - 1]]); ys.push(best); text.push(text[text.length - 1]); }
    return { x: xs, y: ys, text };
  }
  function history(report, view) {
    const t = report.trials, values = t.values[report.objectives[0].metric], by = view.set.along || "trial";
    const [order, x, title] = along(report, by);
    const shown = order.filter((i) => view.shown[i] && values[i] !== null && values[i] !== undefined);
    if (!shown.length) return "no trial that is shown has a value yet";
    const drawn = spread(byPlace(report, shown), MOST_POINTS, 500), data = [];
    for (const state of STATES) {
      const list = drawn.filter((i) => t.state[i] === state);
      if (list.length) data.push({ type: "scatter", mode: "markers", name: state,
        x: list.map((i) => x[i]), y: list.map((i) => values[i]), text: list.map((i) => t.number[i]),
        marker: { color: view.colour[state], symbol: SYMBOLS[state], size: 7, line: { width: 1.5, color: view.colour[state] } },
        hovertemplate: `trial %{text}: %{y:.6g}<extra>${state}</extra>` });
    }
    const best = bestSoFar(report, order, x);
    if (best.x.length) data.push({ type: "scatter", mode: "lines", name: "best so far", ...best,
      line: { shape: "hv", color: view.colour.ink, width: 1.5 }, hovertemplate: "best so far: trial %{text}, %{y:.6g}<extra></extra>" });
    const first = winner(report), range = robust(shown.map((i) => values[i]));
    if (shown.includes(first)) data.push({ type: "scatter", mode: "markers", name: `the answer, trial ${t.number[first]}`, x: [x[first]], y: [values[first]],
      marker: { color: view.colour.ink, symbol: "star", size: 14, line: { width: 1, color: view.colour.paper } }, hovertemplate: `trial ${t.number[first]}: %{y:.6g}<extra>the answer</extra>` });
    return { data, layout: layout(view, axis(view, title), axis(view, titled(report), range.range ? { range: range.range } : {})),
      caption: "The best so far is of complete trials alone: a pruned one has its value at the epoch where it stopped." + (by === "time" ? clock(report).said : "") +
        (drawn.length < shown.length ? ` ${drawn.length} of ${shown.length} trials are drawn: the best 500, and others evenly.` : "") + left(range.beyond),
      controls: [{ name: "along", title: "along", options: XS, value: by }] };
  }
  function studies(reports, view) {
    const by = view.set.along || "trial", data = [];
    let title = "";
    reports.forEach((report, k) => {
      const [order, x, name] = along(report, by), best = bestSoFar(report, order, x);
      const { at } = clock(report);
      title = by === "time" ? "hours since the first trial began, without pauses" : name;
      if (by === "time") best.x = best.x.map((_, j) => best.x[j] * timeUnit(Math.max(0, ...order.slice(-1).map((i) => at(report.trials.ended[i]))))[1] / 3600);
      if (best.x.length) data.push({ type: "scatter", mode: "lines+markers", name: safe(report.name), ...best,
        line: { shape: "hv", width: 2, dash: DASHES[k % DASHES.length], color: view.colour[["complete", "pruned", "running", "infeasible"][k % 4]] },
        hovertemplate: `trial %{text}: %{y:.6g}<extra>${safe(report.name)}</extra>` });
    });
    if (!data.length) return "no study has a complete trial yet";
    const judged = [...new Set(reports.map((r) => titled(r)))];  // by metric and direction
    return { data, layout: layout(view, axis(view, title), axis(view, judged.length > 1 ? "value" : judged[0])),
      caption: judged.length > 1 ? `They are judged differently, ${judged.join(", ")}: the curves cannot be compared.` : "",
      controls: [{ name: "along", title: "along", options: XS, value: by }] };
  }

  return { STATES, SYMBOLS, DASHES, MOST_AXES, MOST_SLICES, MOST_POINTS, MOST_LINES, GRID, REACH, MARGIN, safe, figure, written, winner, clock, label, titled, better,
    indices, spread, byPlace, robust, left, axis, layout, timeUnit, curves, chosen, trial, system, groups, history, studies };
})();
