"use strict";
// Methods are switched and highlighted by the legend; points tell what they are, by pointer or by arrow keys.
const all = (query, root = document) => [...root.querySelectorAll(query)];
const tip = document.getElementById("tip");

for (const button of all("[data-toggle]")) {
  const index = button.dataset.toggle;
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") === "false";
    for (const one of all(`[data-toggle="${index}"]`)) one.setAttribute("aria-pressed", shown);
    for (const one of all(`[data-m="${index}"]`)) one.classList.toggle("off", !shown);
    highlight(null);
  });
  for (const [event, on] of [["pointerenter", true], ["focus", true], ["pointerleave", false], ["blur", false]])
    button.addEventListener(event, () => highlight(on && button.getAttribute("aria-pressed") === "true" ? index : null));
}

function highlight(index) {
  for (const one of all(".on")) one.classList.remove("on");
  document.body.classList.toggle("highlight", index !== null);
  if (index !== null) for (const one of all(`[data-m="${index}"]`)) one.classList.add("on");
}

// Coordinates of a path's points.
const points = (path) => [...path.getAttribute("d").matchAll(/[ML]\s*(-?[\d.]+)[ ,](-?[\d.]+)/g)].map((at) => [+at[1], +at[2]]);

function show(text, svg, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const at = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
  const box = tip.getBoundingClientRect();
  const wide = document.documentElement.clientWidth, above = at.y - box.height - 12;
  tip.style.left = `${scrollX + Math.max(6, Math.min(at.x - box.width / 2, wide - box.width - 6))}px`;
  tip.style.top = `${scrollY + (above < 6 ? at.y + 14 : above)}px`;
}

// What can be pointed at in a drawing: positions with their texts, and a mark for the current one.
const makers = {
  points: (svg, data) => {
    const lines = all("[data-s]", svg);
    return data.series.flatMap((series, at) => points(lines[at].querySelector("path")).map(([x, y], i) =>
      ({ x, y, row: at, of: lines[at], text: `${series.name}\n${series.tips[i]}`, mark: ["circle", { cx: x, cy: y, r: 3.4 }] })));
  },
  clients: (svg, data, clients) => {
    const dots = svg.querySelector(`[data-dots][data-m="${data.series[0]}"]`);
    return points(dots).map(([x, y], i) => {
      const client = data.order[i], [train, test, entropy] = clients.about[client];
      const found = data.series.filter((m) => client in clients.served[m]).map((m) => `${clients.names[m]} ${clients.served[m][client].toFixed(1)}`);
      const about = `${train} training and ${test} test samples\nlabel entropy ${entropy.toFixed(2)} bits`;
      return { x, y, row: 0, of: dots, flat: true, text: `client ${client}: ${found.join(", ")}\n${about}`, mark: ["circle", { cx: x, cy: y, r: 3.4 }] };
    });
  },
  cells: (svg, data) => {
    const box = svg.querySelector("[data-cells]").getBBox();
    const w = box.width / data.clients.length, h = box.height / data.layers.length;
    return data.layers.flatMap((layer, row) => data.clients.map((client, i) => ({
      x: box.x + (i + 0.5) * w, y: box.y + (row + 0.5) * h, row, of: svg, cell: true,
      text: `client ${client}, ${layer}: ${data.counts[row][i].toLocaleString("en")} personal`,
      mark: ["rect", { x: box.x + i * w, y: box.y + row * h, width: w, height: h }],
    })));
  },
};

for (const figure of all("figure[data-kind]")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const shared = figure.closest("section").querySelector("script.clients");
  for (const svg of all(".plot > svg", figure)) {
    let places = null, now = null;
    const plot = svg.parentElement;
    const read = () => (places ??= makers[data.kind](svg, data, shared && JSON.parse(shared.textContent)));
    const visible = () => read().filter((place) => !place.of.closest(".off"));
    const clear = () => { tip.hidden = true; now = null; for (const one of all(".cursor", svg)) one.remove(); };
    const point = (place) => {
      if (place === now) return;
      clear();
      now = place;
      const mark = document.createElementNS("http://www.w3.org/2000/svg", place.mark[0]);
      mark.setAttribute("class", "cursor");
      for (const [name, value] of Object.entries(place.mark[1])) mark.setAttribute(name, value);
      svg.append(mark);
      show(place.text, svg, place.x, place.y);
    };
    const follow = (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      let best = null, least = Infinity;
      for (const place of visible()) {
        const far = Math.abs(place.x - at.x) + Math.abs(place.y - at.y) * (place.flat ? 0.02 : 1);
        if (far < least) [best, least] = [place, far];
      }
      if (best && (best.cell || least < 25)) point(best); else clear();
    };
    svg.addEventListener("pointermove", follow);
    // A finger leaves as soon as it is lifted; what it showed stays until it touches something else.
    svg.addEventListener("pointerdown", follow);
    svg.addEventListener("pointerleave", (event) => event.pointerType === "touch" || clear());
    addEventListener("pointerdown", (event) => svg.contains(event.target) || clear());
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", "Arrow keys go from point to point");
    plot.addEventListener("blur", clear);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: -1, ArrowDown: 1, Escape: 0 }[event.key];
      if (step === undefined || !svg.checkVisibility()) return;
      event.preventDefault();
      if (!step) return clear();
      const found = visible(), rows = [...new Set(found.map((place) => place.row))];
      if (!found.length) return;
      const row = now ? rows.indexOf(now.row) : 0, line = (at) => found.filter((place) => place.row === rows[at]);
      const here = line(Math.max(row, 0)), i = now ? here.indexOf(now) : -1;
      const sideways = event.key === "ArrowLeft" || event.key === "ArrowRight";
      const next = !now ? here[0] : sideways ? here[i + step] : line(row + step)[i];
      if (next) point(next);
    });
  }
}

// A click on a head sorts by its column, the largest first, and a second click the other way; names from A to Z.
for (const table of all("table.sortable")) {
  for (const [column, head] of all("thead th", table).entries()) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.hasAttribute("aria-sort") ? head.getAttribute("aria-sort") === "descending" : column === 0;
      for (const one of all("thead th", table)) one.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => column ? +(row.cells[column].dataset.value ?? -Infinity) : row.cells[0].textContent;
      const order = (a, b) => column ? key(a) - key(b) : key(a).localeCompare(key(b), "en", { numeric: true });
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => (up ? 1 : -1) * order(a, b)));
    });
  }
}

addEventListener("beforeprint", () => { for (const one of all("details")) one.open = true; });
