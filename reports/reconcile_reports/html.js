"use strict";
// Sorting, filtering and linking of the rows; the page reads without it.
(() => {
  const PAGE = 100; // rows in the document at a time: a table of 10,000 lays out slowly
  const find = (id) => document.getElementById(id);
  const table = find("rows-table");

  // A link into something folded opens it.
  function reveal() {
    const id = decodeURIComponent(location.hash.slice(1));
    if (!id) return;
    if (rows && id.startsWith("rows?")) return restore(id.slice(5));
    if (rows && /^row-\d+$/.test(id)) show(Number(id.slice(4)));
    const target = find(id);
    if (!target) return;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    target.scrollIntoView({ block: "start" });
    if (/^(row|detail)-/.test(id)) {
      target.tabIndex = -1; // else the browser takes the focus from it when the page is loaded
      target.focus({ preventScroll: true });
    }
  }

  let rows = null;
  let matching = [];
  let shown = 0;
  let pinned = -1; // a row that a link leads to is shown whatever the filters say
  let sorted = { column: -1, down: false };

  function start() {
    const body = table.tBodies[0];
    rows = Array.from(body.rows, (line, index) => ({ line, index, text: null, cells: null }));
    const form = document.querySelector("form.filters");
    form.hidden = false;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => { pinned = -1; update(); remember(); });
    find("more-rows").addEventListener("click", () => { append(PAGE); });
    Array.from(table.tHead.rows[0].cells, sortable);
    find("rows-details").open = true;
    update();
  }

  function sortable(cell, column) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    cell.append(button);
    button.addEventListener("click", () => {
      sorted = { column, down: sorted.column === column ? !sorted.down : cell.dataset.kind === "number" && column > 0 };
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      update();
    });
  }

  const words = (row) => (row.text ??= row.line.textContent.toLowerCase());
  const cell = (row, column) => (row.cells ??= Array.from(row.line.cells, (one) => one.textContent))[column];
  const chosen = (name) => find(`filter-${name}`)?.value ?? "";

  function update() {
    const text = chosen("text").trim().toLowerCase();
    const equal = [[1, chosen("level")], [3, chosen("check")], [12, chosen("ran")]].filter(([, want]) => want);
    const verdict = chosen("verdict");
    matching = rows.filter((row) =>
      row.index === pinned ||
      ((!verdict || row.line.classList.contains(verdict)) &&
        equal.every(([column, want]) => cell(row, column) === want) &&
        (!text || words(row).includes(text))));
    if (sorted.column >= 0) sort();
    table.tBodies[0].replaceChildren();
    shown = 0;
    append(PAGE);
    const all = rows.length;
    find("row-count").textContent = matching.length === all ? `${all} rows` : `${matching.length} of ${all} rows`;
  }

  function sort() {
    const { column, down } = sorted;
    const numeric = table.tHead.rows[0].cells[column].dataset.kind === "number";
    const key = (row) => (numeric ? value(cell(row, column)) : cell(row, column));
    const keyed = matching.map((row) => [key(row), row]);
    const order = numeric ? (a, b) => a - b : (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    keyed.sort(([a, x], [b, y]) => (down ? order(b, a) : order(a, b)) || x.index - y.index);
    matching = keyed.map(([, row]) => row);
  }

  // NaN and infinity are the largest; what has no number is the smallest.
  function value(text) {
    if (text === "-" || text === "") return -Infinity;
    const number = Number(text.replace("inf", "Infinity"));
    return Number.isNaN(number) ? Number.MAX_VALUE : Math.max(Math.min(number, Number.MAX_VALUE), -Number.MAX_VALUE);
  }

  function append(count) {
    const next = matching.slice(shown, shown + count);
    table.tBodies[0].append(...next.map((row) => row.line));
    shown += next.length;
    const left = matching.length - shown;
    find("more-rows").hidden = left === 0;
    find("more-rows").textContent = `Show ${Math.min(left, PAGE)} of ${left} more rows`;
  }

  // Shows the row of a link, whatever is filtered or not yet in the document.
  function show(index) {
    if (!rows[index]) return;
    pinned = index;
    if (!matching.includes(rows[index])) update();
    const at = matching.indexOf(rows[index]);
    if (at < shown) return;
    table.tBodies[0].replaceChildren(); // not everything before it: that may be thousands of rows
    shown = Math.max(0, at - PAGE / 2);
    find("row-count").textContent += `, shown from number ${shown + 1}; sort or filter to begin at the first`;
    append(PAGE);
  }

  // The filters are part of the address, so that a view can be linked to.
  const NAMES = ["text", "level", "check", "verdict", "ran"];

  function remember() {
    const set = NAMES.filter((name) => chosen(name)).map((name) => `${name}=${encodeURIComponent(chosen(name))}`);
    history.replaceState(null, "", set.length ? `#rows?${set.join("&")}` : "#rows");
  }

  function restore(query) {
    for (const [name, text] of new URLSearchParams(query)) {
      if (NAMES.includes(name) && find(`filter-${name}`)) find(`filter-${name}`).value = text;
    }
    pinned = -1;
    update();
    find("rows").scrollIntoView();
  }

  if (table) start();
  addEventListener("hashchange", reveal);
  reveal();
})();
