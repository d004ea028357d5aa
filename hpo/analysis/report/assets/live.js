"use strict";
/* Keeps a live page up to date: a stream of events says what has changed. Trials that have changed come with it; for all
   else the page is read anew, and its parts go in the place of those that are here. */
(() => {
  const root = document.documentElement, state = document.querySelector("[data-state]"), AGAIN = 3000;
  const report = document.querySelector("[data-later]"); // the scripts of a report are here too
  const parts = new Map(); // name -> its HTML as it came
  let cursor = root.dataset.cursor, source = null, timer = 0, pressed = false, held = [];

  function say(text, away = true) {
    state.textContent = text;
    state.toggleAttribute("data-away", away);
  }
  function later(what) {
    clearTimeout(timer);
    timer = setTimeout(what, AGAIN);
  }
  /* What is replaced between the press and the release of a button or a key would never hear of the click. */
  function calmly(change) {
    pressed ? held.push(change) : change();
  }
  function release() {
    setTimeout(() => { // after the click
      const changes = held;
      [pressed, held] = [false, []];
      for (const change of changes) change();
    });
  }
  function listen() {
    source?.close();
    clearTimeout(timer);
    const own = source = new EventSource(`events?${new URLSearchParams({ since: cursor })}`);
    const on = (kind, what) => own.addEventListener(kind, (event) => { if (own === source) what(event); });
    on("open", () => say("live", false));
    on("error", () => {
      say("The server does not answer. The page stays as it is, and asks again.");
      if (own.readyState === EventSource.CLOSED) later(listen);
    });
    on("rows", ({ data, lastEventId }) => {
      cursor = lastEventId;
      calmly(() => merge(JSON.parse(data)));
    });
    on("refresh", renew);
    on("trouble", ({ data }) => {
      const { text } = JSON.parse(data);
      text ? say(text) : say("live", false);
    });
    on("gone", () => {
      own.close();
      say("This is in the ledger no more: the page stays as it was last.");
      later(listen); // it may be made anew
    });
  }
  function merge(part) {
    Report.pages[0].merge(part);
    const status = document.querySelector("[data-status]");
    if (status) {
      status.textContent = part.status;
      status.className = `state ${part.state}`;
    }
  }
  async function renew() {
    if (document.querySelector("[data-unread]")) return location.reload();
    source.close();
    try {
      const answer = await fetch(location.href.split("#")[0]);
      const text = await answer.text();
      if (answer.ok) calmly(() => swap(new DOMParser().parseFromString(text, "text/html")));
      else {
        say(text);
        later(renew);
      }
    } catch {
      say("The server does not answer. The page stays as it is, and asks again.");
      later(renew);
    }
  }
  function swap(page) {
    const data = JSON.parse(page.getElementById("report-data").textContent);
    for (const part of page.querySelectorAll("[data-part]")) {
      const name = part.dataset.part, html = part.outerHTML;
      if (parts.get(name) !== html) document.querySelector(`[data-part="${name}"]`)?.replaceWith(document.adoptNode(part));
      parts.set(name, html);
    }
    cursor = page.documentElement.dataset.cursor;
    if (report) Report.pages[0].renew(Array.isArray(data) ? data[0] : data);
    listen();
  }
  /* A browser opens six connections to a server, and a stream keeps one: a page that nobody sees has none. */
  function begin() {
    for (const part of document.querySelectorAll("[data-part]")) parts.set(part.dataset.part, part.outerHTML);
    for (const kind of ["pointerdown", "keydown"]) addEventListener(kind, () => { pressed = true; }, true);
    for (const kind of ["pointerup", "pointercancel", "keyup"]) addEventListener(kind, release, true);
    addEventListener("blur", release);
    document.addEventListener("visibilitychange", () => document.hidden ? source?.close() : listen());
    if (!document.hidden) listen();
  }
  if (report && !("ready" in root.dataset)) document.addEventListener("ready", begin, { once: true });
  else begin();
})();
