"use strict";
// What pages do beyond their links and forms: filter while typing, and move in trees by arrow keys.

// A page that has everything filters it here; others ask the server, by the same form.
for (const list of document.querySelectorAll("[data-filtered]")) {
  const form = document.querySelector("form.filter");
  const input = form?.querySelector("[type=search]");
  const status = document.querySelector("[role=status]");
  if (!input || input.value) continue; // filtered by the server: what is left out is not here
  const isTree = list.matches(".tree-box");
  const rows = [...list.querySelectorAll(isTree ? ".tensor" : "li")];
  // A label in a tree has only the end of the name.
  const texts = rows.map((row) => {
    const name = isTree ? row.querySelector(".name").title : "";
    return `${name} ${row.textContent}`.toLowerCase();
  });
  const groups = [...list.querySelectorAll("details")];
  const opened = new Map(groups.map((group) => [group, group.open]));
  const told = status.textContent;
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, i) => {
      row.hidden = !words.every((word) => texts[i].includes(word));
      shown += !row.hidden;
    });
    for (const group of groups) {
      const has = group.querySelector(".tensor:not([hidden])") !== null;
      group.parentElement.hidden = !has;
      group.open = words.length ? has : opened.get(group);
    }
    const count = (number) => number.toLocaleString("en");
    status.textContent = words.length ? `${count(shown)} of ${count(rows.length)} ${status.dataset.noun}` : told;
  };
  form.querySelector("button").hidden = true;
  form.addEventListener("submit", (event) => event.preventDefault());
  input.addEventListener("input", filter);
}

// Arrow keys as in other trees: up and down between groups, right opens, left closes or goes to the group above.
for (const tree of document.querySelectorAll(".tree")) {
  tree.addEventListener("keydown", (event) => {
    const at = event.target.closest(".group");
    if (!at || event.altKey || event.ctrlKey || event.metaKey) return;
    const visible = [...tree.querySelectorAll(".group")].filter((group) => group.offsetParent !== null);
    const group = at.parentElement;
    const moves = {
      ArrowDown: () => visible[visible.indexOf(at) + 1],
      ArrowUp: () => visible[visible.indexOf(at) - 1],
      Home: () => visible[0],
      End: () => visible.at(-1),
      ArrowRight: () => {
        if (group.open === false) group.open = true;
        else return group.querySelector("li .group");
      },
      ArrowLeft: () => {
        if (group.open) group.open = false;
        else return group.parentElement.closest("details")?.querySelector(".group");
      },
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    move()?.focus();
  });
}

// A page of what happens now asks for itself each second, and takes what has changed.
if (document.querySelector("[data-live]")) {
  const update = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch(location.href, {credentials: "same-origin"});
        const found = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("[data-live]");
        if (answer.ok && found) take(document.querySelector("[data-live]"), found);
      } catch {
        // The server may be restarting: what is shown stays until it answers.
      }
    }
    setTimeout(update, 1000);
  };
  // Elements stay where they are, and keep the focus, unless there are others now.
  const take = (old, made) => {
    if (old.tagName !== made.tagName || old.children.length !== made.children.length) return old.replaceWith(made);
    for (const {name, value} of made.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    if (!old.children.length) {
      if (old.textContent !== made.textContent) old.textContent = made.textContent;
      return;
    }
    const pairs = [...old.children].map((child, i) => [child, made.children[i]]);
    pairs.forEach(([child, other]) => take(child, other));
  };
  setTimeout(update, 1000);
}
