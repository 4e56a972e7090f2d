// The values under the pointer and the cursor, and tables that can be sorted. Without it, the page
// is complete but for these.
"use strict";

const make = (parent, tag, name) => {
  const node = document.createElement(tag);
  node.className = name;
  return parent.appendChild(node);
};
const runs = [...document.querySelectorAll(".legend label")].map((label) => ({
  name: label.querySelector("span").textContent,
  key: label.querySelector(".key"),
  box: label.querySelector("input"),
}));

// The chart. A plot is a slider over the places on its x axis, which are those of the marks.
for (const plot of document.querySelectorAll(".plot")) {
  const drawing = plot.querySelector("svg");
  const box = plot.querySelector('[id$="patch_2"]'); // what matplotlib calls the axes' background
  const marks = runs.map((_, run) =>
    [...plot.querySelectorAll(`.values-${run} use`)].map((mark) => {
      const [, head, value] = mark.textContent.match(/^(.*?): (.*?) \(/);
      return { x: Number(mark.getAttribute("x")), head, value };
    }));
  const line = make(plot, "div", "line");
  const values = make(plot, "div", "values");
  const label = plot.getAttribute("aria-label");
  let at = null;

  const shown = () => marks.map((all, run) => (runs[run].box.checked ? all : []));
  const places = () => [...new Set(shown().flatMap((all) => all.map(({ x }) => x)))].sort((a, b) => a - b);
  const size = () => drawing.getBoundingClientRect().width / drawing.viewBox.baseVal.width;
  const hide = () => {
    at = null;
    line.hidden = values.hidden = true;
  };
  const show = (x) => {
    at = x;
    const found = shown().flatMap((all, run) => {
      const mark = all.findLast((mark) => mark.x <= x + 0.01);
      return mark ? [{ ...mark, ...runs[run] }] : [];
    });
    const { head } = found.find((mark) => mark.x === x);
    found.sort((a, b) => parseFloat(b.value) - parseFloat(a.value));
    values.replaceChildren(head);
    for (const { name, key, value } of found) {
      const row = make(values, "div", "");
      row.append(key.cloneNode(true), name);
      make(row, "b", "").textContent = value;
    }
    line.hidden = values.hidden = false;
    const left = x * size();
    const { top, height } = box.getBoundingClientRect();
    const above = top - plot.getBoundingClientRect().top;
    Object.assign(line.style, { left: `${left}px`, top: `${above}px`, height: `${height}px` });
    const right = left + 12 + values.offsetWidth <= plot.clientWidth;
    values.style.left = `${Math.max(0, right ? left + 12 : left - 12 - values.offsetWidth)}px`;
    plot.setAttribute("aria-valuenow", places().indexOf(x));
    plot.setAttribute("aria-valuetext", [head, ...found.map(({ name, value }) => `${name} ${value}`)].join(", "));
  };
  const step = (by) => {
    const all = places();
    if (!all.length) return;
    const now = at === null ? (by < 0 ? all.length : -1) : all.indexOf(at);
    show(all[Math.min(all.length - 1, Math.max(0, now + by))]);
  };

  hide();
  plot.tabIndex = 0;
  plot.setAttribute("role", "slider");
  plot.setAttribute("aria-label", `${label} The arrow keys read the values.`);
  plot.setAttribute("aria-valuemin", 0);
  plot.setAttribute("aria-valuemax", Math.max(0, places().length - 1));
  plot.setAttribute("aria-valuenow", 0);
  plot.addEventListener("pointermove", (event) => {
    const pointer = (event.clientX - drawing.getBoundingClientRect().left) / size();
    const far = (x) => Math.abs(x - pointer);
    const nearest = places().reduce((near, x) => (near === null || far(x) < far(near) ? x : near), null);
    if (nearest !== null) show(nearest);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") hide();
    if (!(event.key in steps)) return;
    event.preventDefault();
    step(steps[event.key]);
  });
}

// Tables with one line of headings and several rows are sorted by a click on a heading.
const number = (text) => parseFloat(text.replace("−", "-").replace(/[,+]/g, ""));
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  if (table.tHead.rows.length > 1 || body.rows.length < 2) continue;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      const texts = new Map([...body.rows].map((row) => [row, row.cells[column].textContent.trim()]));
      const compare = (a, b) => {
        const [x, y] = [number(a), number(b)];
        if (isNaN(x) && isNaN(y)) return a.localeCompare(b, "en", { numeric: true });
        return isNaN(x) ? -Infinity : isNaN(y) ? Infinity : x - y;
      };
      const missing = (row) => texts.get(row) === "-";
      const rows = [...body.rows].sort((a, b) =>
        missing(a) - missing(b) || (down ? -1 : 1) * compare(texts.get(a), texts.get(b)));
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...rows);
    });
  });
}

// A page that is served asks for what is new. What the reader has chosen stays.
const version = document.documentElement.dataset.version;
if (version) {
  const inputs = [...document.querySelectorAll(".chart input")];
  const chosen = JSON.parse(sessionStorage.getItem("chosen") ?? "{}");
  for (const input of inputs) input.checked = chosen[input.id] ?? input.checked;
  setInterval(async () => {
    const answer = await fetch("version").catch(() => null);
    if (!answer?.ok || (await answer.text()) === version) return;
    const now = Object.fromEntries(inputs.map((input) => [input.id, input.checked]));
    sessionStorage.setItem("chosen", JSON.stringify(now));
    location.reload();
  }, 2000);
}
