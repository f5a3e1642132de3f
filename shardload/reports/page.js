
"use strict";
// Sorts and searches the table of variables. Cells with data-value are sorted by this number, all others by their text.
{
  const table = document.querySelector(".variables");
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...body.rows];
  const texts = rows.map((row) => {
    const parts = [...row.querySelectorAll("th, td:not(:last-child), summary, li:not(.decision)")];
    return parts.map((part) => part.textContent).join("\n").toLowerCase();
  });
  const search = document.querySelector("#search");
  const status = search.querySelector("[role=status]");
  const {compare} = new Intl.Collator("en", {numeric: true});

  const bytes = (count) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    const unit = Math.min(Math.floor(Math.log2(Math.max(count, 1)) / 10), units.length - 1);
    return `${unit ? (count / 1024 ** unit).toFixed(1) : count} ${units[unit]}`;
  };

  const filter = () => {
    const words = search.querySelector("input").value.toLowerCase().split(/\s+/);
    let shown = 0;
    let total = 0;
    rows.forEach((row, i) => {
      row.hidden = !words.every((word) => texts[i].includes(word));
      if (!row.hidden) {
        shown += 1;
        total += Number(row.querySelector(".each").dataset.value);
      }
    });
    const count = (number) => number.toLocaleString("en");
    status.textContent = `${count(shown)} of ${count(rows.length)} variables, ${bytes(total)} on each device`;
  };

  const sort = (column, order) => {
    const cells = rows.map((row) => row.cells[column]);
    const numbers = cells.every((cell) => cell.dataset.value);
    const keys = new Map(rows.map((row, i) => [row, numbers ? Number(cells[i].dataset.value) : cells[i].textContent]));
    const compared = (a, b) => (numbers ? keys.get(a) - keys.get(b) : compare(keys.get(a), keys.get(b)));
    const sign = order === "descending" ? -1 : 1;
    const sorted = order === "none" ? rows : [...rows].sort((a, b) => sign * compared(a, b));
    body.append(...sorted);
    heads.forEach((head, i) => head.setAttribute("aria-sort", i === column ? order : "none"));
  };

  // By the column, the other way round, then in the order of the model again.
  const next = {none: "ascending", ascending: "descending", descending: "none"};
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => sort(column, next[head.getAttribute("aria-sort")]));
  });
  search.querySelector("input").addEventListener("input", filter);
  search.hidden = false;
  filter();
}
