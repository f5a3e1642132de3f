
"use strict";
// A table of names as a tree or a list, which folds, sorts and searches. Cells of a column with data-number are sorted by
// their data-value, all others by their text.
for (const table of document.querySelectorAll(".names")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const search = document.querySelector("#search");
  const input = search.querySelector("[type=search]");
  const asTree = search.querySelector("[type=checkbox]");
  const openAll = search.querySelector("button");
  const status = search.querySelector("[role=status]");
  const {compare} = new Intl.Collator("en", {numeric: true});
  const MOST_OPEN = 40;

  // Rows come in the order of the tree, each with its depth.
  const root = {children: []};
  const path = [root];
  const nodes = [...body.rows].map((row) => {
    const depth = Number(row.dataset.depth);
    const node = {row, parent: path[depth], children: [], open: false, found: true, button: row.querySelector("th button")};
    node.parent.children.push(node);
    path[depth + 1] = node;
    return node;
  });
  const leaves = nodes.filter((node) => !node.button);
  const groups = nodes.filter((node) => node.button);
  for (const leaf of leaves) {
    const parts = [...leaf.row.querySelectorAll("th, td:not(.why), summary, li:not(.decision)")];
    leaf.text = parts.map((part) => part.textContent).join("\n").toLowerCase();
    leaf.size = Number(leaf.row.querySelector("td svg").parentElement.dataset.value ?? 0);
    leaf.count = Number(leaf.row.dataset.count ?? 1);
  }

  // Levels are open from the top while all of it can be seen at a glance.
  let level = root.children;
  let seen = level.length;
  while (level.length) {
    const next = level.flatMap((node) => node.children);
    seen += next.length;
    if (seen > MOST_OPEN && level.length > 1) break;
    for (const node of level) node.open = true;
    level = next;
  }

  // As in Python: the first unit in which it is less than 1,000.
  const bytes = (count) => {
    if (count < 1024) return `${count} B`;
    const units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let value = count / 1024;
    while (Number(value.toFixed(1)) >= 1000 && units.length > 1) {
      value /= 1024;
      units.shift();
    }
    return `${value.toFixed(1)} ${units[0]}`;
  };
  const words = () => input.value.toLowerCase().split(/\s+/).filter(Boolean);
  // While someone searches, groups are open that have what was found.
  const state = () => (words().length ? "found" : "open");

  const show = () => {
    const key = state();
    for (const leaf of leaves) leaf.fits = words().every((word) => leaf.text.includes(word));
    for (const group of [...groups].reverse()) group.fits = group.children.some((node) => node.fits);
    for (const node of nodes) {
      const {parent} = node;
      node.seen = node.fits && (parent === root || (parent.seen && parent[key]));
      node.row.hidden = asTree.checked ? !node.seen : !node.fits || Boolean(node.button);
      node.button?.setAttribute("aria-expanded", String(node[key]));
    }
    openAll.hidden = !asTree.checked || !groups.length;
    openAll.textContent = groups.every((group) => group[key]) ? "Close all" : "Open all";
  };

  const count = () => {
    const found = leaves.filter((leaf) => leaf.fits);
    const sum = (of, key) => of.reduce((total, leaf) => total + leaf[key], 0).toLocaleString("en");
    const size = found.reduce((total, leaf) => total + leaf.size, 0);
    const added = table.dataset.sum === undefined ? "" : `, ${bytes(size)}${table.dataset.sum}`;
    status.textContent = `${sum(found, "count")} of ${sum(leaves, "count")} ${table.dataset.noun}${added}`;
  };

  // A bar compares what is next to it: the groups and tensors of one group, or all of a list.
  const draw = () => {
    for (const family of asTree.checked ? [root, ...groups].map((group) => group.children) : [leaves]) {
      const sizes = family.map(({row}) => Number(row.querySelector("td svg").parentElement.dataset.value ?? 0));
      const full = Math.max(...sizes, 1e-300);
      family.forEach(({row}, i) => row.querySelector("td rect")?.setAttribute("width", 1000 * (sizes[i] / full)));
    }
  };

  let sorted = {column: 0, order: "none"};
  const sort = ({column, order}) => {
    const isNumber = "number" in heads[column].dataset;
    const key = ({row}) => {
      const cell = row.cells[column];
      return isNumber ? Number(cell.dataset.value ?? -Infinity) : cell.textContent;
    };
    const sign = order === "descending" ? -1 : 1;
    // NaN is above Infinity, as in Python; the difference of two infinities is NaN.
    const compared = (a, b) => sign * (isNumber ? Number.isNaN(a.key) - Number.isNaN(b.key) || a.key - b.key || 0 : compare(a.key, b.key));
    const inOrder = (family) => {
      if (order === "none") return family;
      return family.map((node) => ({node, key: key(node)})).sort(compared).map(({node}) => node);
    };
    const below = (node) => inOrder(node.children).flatMap((inner) => [inner.row, ...below(inner)]);
    body.append(...(asTree.checked ? below(root) : inOrder(leaves).map(({row}) => row)));
    heads.forEach((head, i) => head.setAttribute("aria-sort", i === column ? order : "none"));
    sorted = {column, order};
  };

  const arrange = () => {
    table.classList.toggle("tree", asTree.checked);
    sort(sorted);
    draw();
    show();
  };

  // By the column, the other way round, then in the order of the model again.
  const next = {none: "ascending", ascending: "descending", descending: "none"};
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sort({column, order: next[head.getAttribute("aria-sort")]}));
  });
  for (const group of groups) {
    group.button.addEventListener("click", () => {
      group[state()] = !group[state()];
      show();
    });
  }
  openAll.addEventListener("click", () => {
    const key = state();
    const isOpen = groups.every((group) => group[key]);
    for (const group of groups) group[key] = !isOpen;
    show();
  });
  // Arrow keys as in other trees: up and down between groups, right opens, left closes or goes to the group above.
  body.addEventListener("keydown", (event) => {
    const at = groups.find((group) => group.button === event.target);
    if (!at || event.altKey || event.ctrlKey || event.metaKey) return;
    const visible = [...body.querySelectorAll(".group:not([hidden]) th button")];
    const step = (by) => visible[visible.indexOf(at.button) + by];
    const isOpen = at[state()];
    const moves = {
      ArrowDown: () => step(1),
      ArrowUp: () => step(-1),
      Home: () => visible[0],
      End: () => visible.at(-1),
      ArrowRight: () => (isOpen ? at.children.find((node) => node.button)?.button : at.button.click()),
      ArrowLeft: () => (isOpen ? at.button.click() : at.parent.button),
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    move()?.focus();
  });
  input.addEventListener("input", () => {
    for (const group of groups) group.found = true;
    show();
    count();
  });
  asTree.addEventListener("change", arrange);
  search.hidden = false;
  arrange();
  count();
}
