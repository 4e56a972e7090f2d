// The values under the pointer and the cursor, and tables that can be sorted. Without it, the page
// is complete but for these.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const shown = (run) => document.getElementById(`show-${run}`).checked;
const make = (parent, tag, name) => {
  const node = document.createElement(tag);
  node.className = name;
  return parent.appendChild(node);
};

// The chart. A plot is a slider over the places on its x axis.
for (const plot of document.querySelectorAll(".plot")) {
  const axis = data.axes[plot.dataset.axis];
  const xsOf = axis.of.map((place) => axis.xs[place]); // of each run
  const line = make(plot, "div", "line");
  const values = make(plot, "div", "values");
  const label = plot.getAttribute("aria-label");
  let at = null;

  const places = () =>
    [...new Set(xsOf.flatMap((xs, run) => (shown(run) ? xs : [])))].sort((a, b) => a - b);
  const scale = () => {
    const wide = plot.querySelector(".at-ease svg");
    const drawing = wide.getClientRects().length ? wide : plot.querySelector(".in-narrow svg");
    const rect = drawing.getBoundingClientRect();
    const size = rect.width / drawing.viewBox.baseVal.width;
    const { log, x, y, box } = axis.scales[drawing === wide ? "wide" : "narrow"];
    const place = (value) => (x[0] + x[1] * (log ? Math.log10(value) : value)) * size;
    return { place, box: box.map((side) => side * size), left: rect.left };
  };
  const hide = () => {
    at = null;
    line.hidden = values.hidden = true;
  };
  const show = (value) => {
    at = value;
    const { place, box } = scale();
    const left = place(value);
    const near = (xs) => xs.findLastIndex((x) => x <= value * (1 + 1e-9));
    const found = xsOf.flatMap((xs, run) => {
      const i = near(xs);
      return shown(run) && i >= 0 ? [{ run, text: data.texts[run][i] }] : [];
    });
    found.sort((a, b) => parseFloat(b.text) - parseFloat(a.text));
    const [size, symbol] = axis.units.findLast(([size]) => size <= value) ?? axis.units[0] ?? [];
    const head = symbol ? `${+(value / size).toPrecision(3)} ${symbol}` : `Round ${value}`;
    values.replaceChildren(head);
    const texts = found.map(({ run, text }) => {
      const row = make(values, "div", "");
      row.append(document.querySelector(`label:has(#show-${run}) .key`).cloneNode(true));
      row.append(data.names[run]);
      make(row, "b", "").textContent = text;
      return `${data.names[run]} ${text}`;
    });
    line.hidden = values.hidden = false;
    Object.assign(line.style, { left: `${left}px`, top: `${box[1]}px`, height: `${box[3] - box[1]}px` });
    const right = left + 12 + values.offsetWidth <= plot.clientWidth;
    values.style.left = `${Math.max(0, right ? left + 12 : left - 12 - values.offsetWidth)}px`;
    plot.setAttribute("aria-valuenow", value);
    plot.setAttribute("aria-valuetext", [head, ...texts].join(", "));
  };
  const step = (by) => {
    const all = places();
    if (!all.length) return;
    const now = at === null ? (by < 0 ? all.length : -1) : all.indexOf(at);
    show(all[Math.min(all.length - 1, Math.max(0, now + by))]);
  };

  hide();
  const all = places();
  plot.tabIndex = 0;
  plot.setAttribute("role", "slider");
  plot.setAttribute("aria-label", `${label} The arrow keys read the values.`);
  plot.setAttribute("aria-valuemin", all[0] ?? 0);
  plot.setAttribute("aria-valuemax", all.at(-1) ?? 0);
  plot.setAttribute("aria-valuenow", all[0] ?? 0);
  plot.addEventListener("pointermove", (event) => {
    const { place, left } = scale();
    const far = (x) => Math.abs(place(x) - (event.clientX - left));
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
