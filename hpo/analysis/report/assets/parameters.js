"use strict";
/* Figures of parameters, objectives and workers; see figures.js. */
Object.assign(Figures, (() => {
  const { STATES, SYMBOLS, MOST_AXES, MOST_SLICES, MOST_POINTS, MOST_LINES, GRID, REACH, MARGIN, safe, figure, winner, clock, label, titled, better,
    indices, spread, byPlace, robust, left, axis, layout, timeUnit } = Figures;
  const COLUMNS = 3, FEWEST = 10, OUTCOMES = { complete: "complete", pruned: "pruned", paused: "paused", running: "running", lost: "failed",
    preempted: "waiting", restarted: "infeasible" };

  function byImportance(report, varied = false) { // the searched paths, the most important first
    const shares = report.importances.shares[report.objectives[0].metric] || {};
    return [...report.trials.searched].sort((a, b) => (shares[b] ?? -1) - (shares[a] ?? -1))
      .filter((path) => !varied || new Set(report.trials.settings[path]).size > 1);
  }
  function dimension(report, path) {
    return report.importances.dimensions[path] || { kind: "choice", log: false, label: path };
  }
  /* Where a value lies along its dimension, from 0 to 1; null where it is not active. */
  function unit(report, path) {
    const one = dimension(report, path), values = report.trials.settings[path];
    if (one.kind === "choice") {
      const options = [...new Set([...(one.options || []).map(text), ...values.filter((v) => v !== null).map(text)])];
      return { ticks: options, at: (v) => v === null ? null : options.length > 1 ? options.indexOf(text(v)) / (options.length - 1) : 0.5 };
    }
    const scale = one.log ? Math.log : (v) => v, low = scale(one.low), high = scale(one.high);
    return { ticks: [one.low, one.high].map(figure), at: (v) => v === null ? null : high > low ? (scale(v) - low) / (high - low) : 0.5 };
  }
  /* The axis of a dimension: whole numbers have whole ticks, powers of two are ticks themselves. */
  function scaled(report, path) {
    const one = dimension(report, path), few = one.whole && one.high - one.low <= 10;
    if (one.kind === "choice") return { type: "category" };
    if (one.ticks) return { type: "log", tickvals: one.ticks, ticktext: one.ticks.map(String) };
    const decades = one.log && one.high >= 100 * one.low; // their parts would overlap on a narrow screen
    return { type: one.log ? "log" : "linear", nticks: 5, ...(few || decades ? { dtick: 1 } : {}) };
  }
  function searched(report, path) { // the axis of a number over the whole range that is searched, with room for its ends
    const one = dimension(report, path), form = scaled(report, path), [low, high] = [one.low, one.high].map(form.type === "log" ? Math.log10 : Number);
    return { ...form, range: [low - 0.03 * (high - low), high + 0.03 * (high - low)] };
  }
  const text = (value) => typeof value === "string" ? value : JSON.stringify(value);
  const none = "the study searches nothing in which its trials differ";

  function mostlyStopped(report) { // the options of a choice that complete trials, and so the shares, know little of
    const t = report.trials, found = [];
    for (const [path, one] of Object.entries(report.importances.dimensions)) {
      if (one.kind !== "choice") continue;
      const counts = new Map(); // option -> [its trials that were pruned, all of them]
      (t.settings[path] || []).forEach((value, i) => {
        if (value === null || value === undefined) return;
        const count = counts.get(String(value)) || [0, 0];
        counts.set(String(value), [count[0] + (t.state[i] === "pruned"), count[1] + 1]);
      });
      for (const [value, [pruned, all]] of counts) if (all >= 5 && pruned / all >= 0.75) found.push(`${pruned} of ${all} trials with ${one.label} = ${value}`);
    }
    return found.length ? `${found.join(" and ")} were stopped early, so the complete trials say little about ${found.length === 1 ? "that choice" : "those choices"}. ` : "";
  }
  function importances(report, view) {
    const metric = report.importances.shares[view.set.objective] ? view.set.objective : report.objectives[0].metric;
    if (report.importances.lacking[metric]) return report.importances.lacking[metric];
    const shares = Object.entries(report.importances.shares[metric]).slice(0, 20).reverse();
    const complete = report.trials.state.filter((s) => s === "complete").length;
    return { data: [{ type: "bar", orientation: "h", x: shares.map(([, s]) => 100 * s), y: shares.map(([p]) => safe(label(report, p))),
      text: shares.map(([, s]) => ` ${Math.round(100 * s)} %`), textposition: "outside", cliponaxis: false, marker: { color: view.colour.complete },
      hovertemplate: "%{y}: %{x:.1f} %<extra></extra>" }],
      layout: layout(view, axis(view, `share of the difference in ${safe(metric)}, %`, { rangemode: "tozero" }), axis(view, "", { type: "category" }),
        { height: 128 + 30 * shares.length, margin: { l: 60, r: 50, t: 34, b: 56 } }),
      caption: `Of ${complete} complete trials, by PED-ANOVA. What made trials stop is not in it. ${mostlyStopped(report)}${report.importances.caution}`,
      controls: report.objectives.length > 1 ? [{ name: "objective", options: report.objectives.map((o) => [o.metric, o.metric]), value: metric }] : [] };
  }

  function slices(report, view) {
    const t = report.trials, values = t.values[report.objectives[0].metric], paths = byImportance(report, true).slice(0, MOST_SLICES);
    if (!paths.length) return none;
    const all = indices(report, view).filter((i) => values[i] !== null), list = spread(byPlace(report, all), MOST_POINTS / 8, 100);
    if (!list.length) return "no trial that is shown has a value yet";
    const columns = Math.min(paths.length, view.width < 560 ? 1 : view.width < 900 ? 2 : COLUMNS), rows = Math.ceil(paths.length / columns);
    const data = [], axes = {}, range = robust(list.map((i) => values[i])), gap = columns > 1 ? 0.03 : 0, tall = 1 / rows;
    paths.forEach((path, k) => {
      const column = k % columns, row = Math.floor(k / columns), n = k ? k + 1 : "", one = dimension(report, path);
      const wide = (1 - gap * (columns - 1)) / columns, from = column * (wide + gap), top = 1 - row * tall;
      axes[`xaxis${n}`] = axis(view, safe(one.label), { domain: [from, from + wide], anchor: `y${n}`,
        ...scaled(report, path) });
      axes[`yaxis${n}`] = axis(view, column ? "" : titled(report), { domain: [top - tall * 0.72, top], anchor: `x${n}`, showticklabels: !column,
        ...(k ? { matches: "y" } : {}), ...(range.range ? { range: range.range } : {}) });
      for (const state of STATES) {
        const some = list.filter((i) => t.state[i] === state && t.settings[path][i] !== null);
        if (some.length) data.push({ type: "scatter", mode: "markers", name: state, legendgroup: state,
          showlegend: !data.some((d) => d.legendgroup === state), xaxis: `x${n}`, yaxis: `y${n}`,
          x: some.map((i) => one.kind === "choice" ? safe(text(t.settings[path][i])) : t.settings[path][i]), y: some.map((i) => values[i]),
          text: some.map((i) => t.number[i]), hovertemplate: `trial %{text}: %{y:.6g} at %{x}<extra>${state}</extra>`,
          marker: { color: view.colour[state], symbol: SYMBOLS[state], size: 6, opacity: 0.8, line: { width: 1.2, color: view.colour[state] } } });
      }
    });
    const bottom = { orientation: "h", y: -0.02, yanchor: "top" };
    return { data, layout: { ...layout(view, axes.xaxis, axes.yaxis), ...axes, height: 60 + 300 * rows, legend: bottom },
      caption: `The most important ${paths.length} of ${t.searched.length} parameters.` + (list.length < all.length ? ` ${list.length} of ${all.length} trials are drawn.` : "") + left(range.beyond) };
  }

  function parallel(report, view) {
    const t = report.trials, metric = report.objectives[0].metric, paths = byImportance(report, true).slice(0, view.width < 560 ? 4 : MOST_AXES);
    const all = byPlace(report, indices(report, view)).filter((i) => t.values[metric][i] !== null), list = spread(all, MOST_LINES, 100);
    if (!paths.length) return none;
    if (!list.length) return "no trial that is shown has a value yet";
    const units = paths.map((path) => unit(report, path)), last = paths.length;
    const values = list.map((i) => t.values[metric][i]).sort((a, b) => a - b), bounds = robust(values).range || [values[0], values[values.length - 1]];
    const place = (v) => bounds[1] > bounds[0] ? Math.min(1.02, Math.max(-0.02, (v - bounds[0]) / (bounds[1] - bounds[0]))) : 0.5;
    const first = winner(report), ranked = list.filter((i) => t.place[i] !== null).sort((a, b) => (b === first) - (a === first)), tenth = Math.max(1, Math.ceil(ranked.length / 10));
    const classes = [["pruned, or without a value", list.filter((i) => t.place[i] === null), { color: view.colour.pruned, width: 0.8, dash: "dot" }, 0.35],
      ["complete", ranked.slice(tenth), { color: view.colour.complete, width: 1 }, 0.45],
      [tenth === 1 ? "the best one" : `the best ${tenth}`, ranked.slice(0, tenth), { color: view.colour.chosen, width: 2.5 }, 1]];
    const data = classes.filter(([, some]) => some.length).map(([name, some, style, opacity]) => {
      const x = [], y = [], trial = [];
      for (const i of some) {
        paths.forEach((path, k) => { const at = units[k].at(t.settings[path][i]); x.push(k); y.push(at === null ? -0.12 : at); trial.push(t.number[i]); });
        x.push(last, null); y.push(place(t.values[metric][i]), null); trial.push(t.number[i], "");
      }
      return { type: "scatter", mode: "lines", name, x, y, text: trial, line: style, opacity, hovertemplate: "trial %{text}<extra></extra>" };
    });
    const names = [...paths.map((path) => label(report, path)), metric], ends = [...units.map((u) => u.ticks), bounds.map(figure)];
    const annotations = ends.flatMap((ticks, k) => ticks.length > 8 ? [] : ticks.map((tick, j) => ({ x: k, y: ticks.length > 1 ? j / (ticks.length - 1) : 0.5,
      text: safe(shortened(tick)), showarrow: false, font: { size: 11, color: view.colour.ink }, bgcolor: view.colour.paper, opacity: 0.85,
      xanchor: k === last ? "right" : k ? "center" : "left" })));
    const shapes = names.map((_, k) => ({ type: "line", x0: k, x1: k, y0: 0, y1: 1, line: { color: view.colour.soft, width: 1 } }));
    const x = axis(view, "", { tickvals: names.map((_, k) => k), ticktext: names.map((n) => safe(shortened(n, view.width < 560 ? 9 : 22))), showgrid: false, range: [-0.15, last + 0.15] });
    const inactive = paths.some((path) => t.settings[path].some((v) => v === null)) ? " A line below an axis: the parameter is not active in that trial." : "";
    return { data, layout: layout(view, x, axis(view, "", { visible: false, range: [-0.2, 1.08] }),
        { annotations, shapes, margin: { ...MARGIN, r: 56 } }), // the last name is centred on the last axis
      caption: `Each axis runs over the range that is searched, logarithmic where the search is; ${safe(metric)}: ${better(report)} is better.${inactive}` +
        (list.length < all.length ? ` ${list.length} of ${all.length} trials are drawn.` : "") };
  }
  const shortened = (word, most = 14) => String(word).length > most ? `${String(word).slice(0, most - 1)}…` : String(word);

  function contour(report, view) {
    const t = report.trials, metric = report.objectives[0].metric;
    const paths = byImportance(report, true).filter((path) => dimension(report, path).kind === "number");
    if (paths.length < 2) return "it takes two numeric parameters in which trials differ";
    const a = paths.includes(view.set.first) ? view.set.first : paths[0];
    const b = paths.includes(view.set.second) && view.set.second !== a ? view.set.second : paths.find((p) => p !== a);
    const list = spread(byPlace(report, indices(report, view)).filter((i) => t.state[i] === "complete" && t.values[metric][i] !== null &&
      t.settings[a][i] !== null && t.settings[b][i] !== null), MOST_LINES, 100);
    if (list.length < 3) return "it takes three complete trials that have both parameters";
    const drawn = list.length >= FEWEST;
    const [u, v] = [unit(report, a), unit(report, b)], values = list.map((i) => t.values[metric][i]);
    const points = list.map((i, k) => [u.at(t.settings[a][i]), v.at(t.settings[b][i]), values[k]]);
    const at = Array.from({ length: GRID }, (_, k) => k / (GRID - 1)), z = at.map((y) => at.map((x) => weighted(points, x, y)));
    const back = (path) => { const one = dimension(report, path); return at.map((s) => one.log ? Math.exp(Math.log(one.low) + s * Math.log(one.high / one.low)) : one.low + s * (one.high - one.low)); };
    const range = robust(values).range;
    const pick = (name, value, but) => ({ name, title: name === "first" ? "across" : "up", value, options: paths.filter((p) => p !== but).map((p) => [p, label(report, p)]) });
    const dots = drawn ? { color: "#ffffff", size: 6, line: { color: "#000000", width: 1 } } : { color: values, colorscale: "Cividis",
      reversescale: better(report) === "less", size: 10, line: { color: view.colour.ink, width: 1 }, colorbar: { title: { text: safe(metric), side: "right" }, thickness: 14 } };
    return { data: [...drawn ? [{ type: "contour", x: back(a), y: back(b), z, colorscale: "Cividis", reversescale: better(report) === "less", ncontours: 12,
      ...(range ? { zmin: range[0], zmax: range[1] } : {}), line: { width: 0.5 }, colorbar: { title: { text: safe(metric), side: "right" }, thickness: 14 }, hoverinfo: "skip" }] : [],
      { type: "scatter", mode: "markers", x: list.map((i) => t.settings[a][i]), y: list.map((i) => t.settings[b][i]), text: list.map((i) => t.number[i]), customdata: values,
        marker: dots, showlegend: false, hovertemplate: "trial %{text}: %{customdata:.6g}<extra></extra>" }],
      layout: layout(view, axis(view, safe(label(report, a)), searched(report, a)), axis(view, safe(label(report, b)), searched(report, b)), { height: 460 }),
      caption: drawn ? `${safe(metric)} (${better(report)} is better): a mean of the complete trials, weighted by one over the squared distance, and none where no trial is within a tenth of the ranges; dots are the ${list.length} trials it is of.`
        : `${safe(metric)} (${better(report)} is better) of the ${list.length} complete trials; contours are drawn from ${FEWEST} on.`,
      controls: [pick("first", a, b), pick("second", b, a)] };
  }
  function weighted(points, x, y) { // Shepard 1968; null where no point is within REACH
    let sum = 0, weights = 0, nearest = Infinity;
    for (const [px, py, value] of points) {
      const square = (px - x) ** 2 + (py - y) ** 2, weight = 1 / (square + 1e-4);
      nearest = Math.min(nearest, square); sum += weight * value; weights += weight;
    }
    return nearest > REACH ** 2 ? null : sum / weights;
  }

  function pareto(report, view) {
    const t = report.trials, metrics = report.objectives.map((o) => o.metric);
    const a = metrics.includes(view.set.first) ? view.set.first : metrics[0];
    const b = metrics.includes(view.set.second) && view.set.second !== a ? view.set.second : metrics.find((m) => m !== a);
    const list = indices(report, view).filter((i) => t.front[i] !== null && t.values[a][i] !== null && t.values[b][i] !== null);
    if (!list.length) return "no trial that is shown is complete";
    const part = (name, some, style) => ({ type: "scatter", mode: "markers", name, x: some.map((i) => t.values[a][i]), y: some.map((i) => t.values[b][i]),
      text: some.map((i) => t.number[i]), marker: style, hovertemplate: "trial %{text}: %{x:.5g}, %{y:.5g}<extra></extra>" });
    const others = spread(list.filter((i) => t.front[i] !== 0), MOST_POINTS), front = list.filter((i) => t.front[i] === 0);
    const pick = (name, value, but) => ({ name, title: name === "first" ? "across" : "up", value, options: metrics.filter((m) => m !== but).map((m) => [m, m]) });
    return { data: [part("other complete trials", others, { color: view.colour.paused, symbol: "circle-open", size: 6 }),
      part("the front", front, { color: view.colour.complete, size: 9 })],
      layout: layout(view, axis(view, titled(report, metrics.indexOf(a))), axis(view, titled(report, metrics.indexOf(b)))),
      caption: `No trial is better than the ${front.length} of the front in every objective.`,
      controls: metrics.length > 2 ? [pick("first", a, b), pick("second", b, a)] : [] };
  }

  function timeline(report, view) {
    const { spans, workers, pauses, resumed, now } = report.timeline, time = clock(report);
    if (!spans.trial.length) return "the study has no attempts";
    const begins = spans.begin.map(time.at), ends = spans.end.map((end, k) => time.at(end ?? now ?? spans.begin[k]));
    const [unit, size] = timeUnit(Math.max(...ends)), groups = new Map();
    spans.trial.forEach((trial, k) => {
      const name = spans.outcome[k];
      if (!groups.has(name)) groups.set(name, { x: [], y: [], text: [], customdata: [] });
      const into = groups.get(name);
      into.x.push(begins[k] / size, ends[k] / size, null); into.y.push(spans.worker[k], spans.worker[k], null); into.text.push(trial, trial, "");
      const span = `from ${figure(Number((begins[k] / size).toPrecision(3)))} to ${figure(Number((ends[k] / size).toPrecision(3)))} ${unit}`;
      into.customdata.push(span, span, "");
    });
    const data = [...groups].map(([name, points]) => ({ type: "scatter", mode: "lines", name: safe(name), ...points,
      line: { color: view.colour[OUTCOMES[name] || "failed"], width: Math.max(3, Math.min(16, 260 / workers.length)) },
      hovertemplate: `trial %{text}: ${safe(name)}, %{customdata}<extra></extra>` }));
    const kills = spans.trial.map((_, k) => k).filter((k) => spans.outcome[k] === "lost");
    if (kills.length) data.push({ type: "scatter", mode: "markers", name: "lost", x: kills.map((k) => ends[k] / size), y: kills.map((k) => spans.worker[k]),
      text: kills.map((k) => spans.trial[k]), marker: { symbol: "x", size: 10, color: view.colour.failed }, showlegend: false, hovertemplate: "trial %{text} was lost here<extra></extra>" });
    const some = pauses.trial.length;
    const waited = pauses.begin.reduce((sum, from, k) => sum + ((pauses.end[k] ?? from) - from), 0) / size;
    const upright = (dash) => (at) => ({ type: "line", x0: time.at(at) / size, x1: time.at(at) / size, yref: "paper", y0: 0, y1: 1, line: { color: view.colour.soft, dash, width: 1 } });
    const moves = resumed.filter((at) => at > 0), shapes = [...moves.map(upright("dot")), ...time.begin.map(upright("solid"))];
    const names = workers.map((name) => safe(shortened(name, 24)));
    return { data, layout: layout(view, axis(view, time.title(unit), { rangemode: "tozero" }),
      axis(view, "worker", { automargin: true, tickvals: workers.length > 40 ? undefined : names.map((_, k) => k), ticktext: workers.length > 40 ? undefined : names, range: [-0.6, workers.length - 0.4] }),
      { height: Math.min(900, 160 + 28 * workers.length), shapes, legend: { orientation: "h", y: 1.02, yanchor: "bottom" } }),
      caption: "A bar for each attempt; gaps are waits." + (some ? ` ${some} pauses at rungs, ${figure(waited)} ${unit} of waiting for a verdict in all.` : "") +
        (time.said && `${time.said} An upright line shows where.`) + (moves.length ? " Dotted lines: the study went on in another environment." : "") + (kills.length ? " A cross: the worker was lost." : "") };
  }

  return { byImportance, importances, slices, parallel, contour, pareto, timeline };
})());
