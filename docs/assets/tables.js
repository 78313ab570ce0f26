/* Tables of results sort by a click on a head, and long ones have a field that filters their rows.
Without this script they are plain tables. */

"use strict";

(() => {
  const SORTED = 8; // rows from which on sorting helps
  const FILTERED = 16;

  /* The number that a cell begins with: "−0.0002", "18.2 (1.00)", "1,185", "< 2", "2⁻¹¹⁸". */
  function figure(text) {
    const plain = text.trim().replace(/−/g, "-").replace(/(\d),(?=\d{3})/g, "$1");
    const power = /^(\d+)([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)/.exec(plain);
    if (power) {
      const digits = [...power[2]].map((c) => (c === "⁻" ? "-" : "⁰¹²³⁴⁵⁶⁷⁸⁹".indexOf(c)));
      return Number(power[1]) ** Number(digits.join(""));
    }
    const found = /^[<~+]?\s*(-?\d+(\.\d+)?(e[-+]?\d+)?)/i.exec(plain);
    return found ? Number(found[1]) : NaN;
  }

  /* Figures by size, other cells by their letters; what is neither, as "–", last in both ways. */
  function compare(numeric, way) {
    return ([a], [b]) => {
      if (!numeric) return way * a.localeCompare(b, "en", { numeric: true });
      const [x, y] = [figure(a), figure(b)];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return way * (x - y);
    };
  }

  function sortable(table) {
    const body = table.tBodies[0];
    const original = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Sort by this column";
      button.append(...head.childNodes);
      if (!button.textContent.trim()) button.setAttribute("aria-label", "Sort by the first column");
      head.append(button);
      button.addEventListener("click", () => {
        const next = { none: "ascending", ascending: "descending", descending: "none" };
        const order = next[head.getAttribute("aria-sort") || "none"];
        for (const other of heads) other.removeAttribute("aria-sort");
        const keyed = original.map((row) => [row.cells[column].textContent, row]);
        const figures = keyed.filter(([text]) => !Number.isNaN(figure(text))).length;
        if (order !== "none") {
          head.setAttribute("aria-sort", order);
          keyed.sort(compare(2 * figures > original.length, order === "ascending" ? 1 : -1));
        }
        body.append(...keyed.map(([, row]) => row));
      });
    });
  }

  function filterable(table) {
    const rows = [...table.tBodies[0].rows];
    const field = document.createElement("input");
    field.type = "search";
    field.placeholder = `Filter ${rows.length} rows`;
    field.setAttribute("aria-label", field.placeholder);
    field.className = "filter";
    const count = document.createElement("output");
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      count.textContent = field.value.trim() ? `${shown} of ${rows.length}` : "";
    });
    const bar = document.createElement("div");
    bar.className = "filters";
    bar.append(field, count);
    (table.closest(".md-typeset__scrollwrap") || table).before(bar);
  }

  function start() {
    for (const table of document.querySelectorAll(".md-content table:not(.highlighttable)")) {
      const rows = table.tBodies[0] ? table.tBodies[0].rows.length : 0;
      if (!table.tHead || rows < SORTED) continue;
      sortable(table);
      if (rows >= FILTERED) filterable(table);
    }
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
