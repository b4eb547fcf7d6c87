// Draws the page's figures, and again where light turns to dark: colours are names of page.css's variables. A figure
// takes the focus: arrow keys move a cursor over what is drawn, and the line below says what is under it.
"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");
const still = matchMedia("(prefers-reduced-motion: reduce)");
const touched = matchMedia("(pointer: coarse)");
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const KEYS = new Set([...Object.keys(ARROWS), "Home", "End", "Enter", " ", "Escape", "Backspace"]);
const POINT = 16; // pixels of the cursor around a point that has no size

function painted(value, colours) {
  if (typeof value === "string") {
    const name = /^var\((--[\w-]+)\)$/.exec(value);
    return name ? colours.getPropertyValue(name[1]).trim() : value;
  }
  if (Array.isArray(value)) return value.map((each) => painted(each, colours));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, painted(each, colours)]));
}

function luminance(colour) {
  const [r, g, b] = colour.map((part) => (part <= 10.31 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// The colour of a value on a scale of plotly's, as red, green and blue.
function shade({ colorscale, zmin = 0, zmax = 1 }, value) {
  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const part = Math.min(Math.max((value - zmin) / (zmax - zmin), 0), 1);
  const next = Math.max(1, colorscale.findIndex(([at]) => part <= at));
  const [[a, low], [b, high]] = [colorscale[next - 1], colorscale[next]];
  return rgb(low).map((each, index) => each + ((rgb(high)[index] - each) * (part - a)) / (b - a));
}

// A heatmap's figures as a trace of their own, dark or light as their cells are not: plotly's own have too little
// contrast on colours in the middle.
function inked(data, layout) {
  return data.flatMap((trace) => {
    if (trace.type !== "heatmap" || !trace.texttemplate) return [trace];
    const cells = trace.z.flatMap((row, y) => row.flatMap((value, x) => (value === null ? [] : [[x, y, value]])));
    const light = ([, , value]) => 1.05 / (luminance(shade(trace, value)) + 0.05) > 4.58; // √(1.05 / 0.05)
    const { texttemplate, ...rest } = trace;
    return [rest, {
      type: "scatter",
      mode: "text",
      x: cells.map(([x]) => trace.x[x]),
      y: cells.map(([, y]) => y),
      text: cells.map(([x, y]) => trace.text[y][x]),
      textfont: { ...layout.font, ...trace.textfont, color: cells.map((cell) => (light(cell) ? "#ffffff" : "#000000")) },
      hoverinfo: "skip",
      showlegend: false,
    }];
  });
}

// A label as plotly takes it, as plain text.
function said(label) {
  const text = String(label ?? "").replace(/<br ?\/?>/g, " · ").replace(/<\/?b>/g, "");
  return text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
}

// An area of next to nothing has no place that a frame could mark.
function tiny({ slice, width, height }) {
  return slice !== undefined && (width < 1 || height < 1);
}

// The nearest cell that lies wholly on that side; one in the same row or column first.
function beside(from, cells, [right, down]) {
  const span = (cell) => (right ? [cell.x, cell.x + cell.width] : [cell.y, cell.y + cell.height]);
  const cross = (cell) => (right ? [cell.y, cell.y + cell.height] : [cell.x, cell.x + cell.width]);
  const middle = ([low, high]) => (low + high) / 2;
  let best = null;
  for (const cell of cells) {
    const way = (middle(span(cell)) - middle(span(from))) * (right || down);
    if (cell === from || way < 1) continue;
    const gap = right + down > 0 ? span(cell)[0] - span(from)[1] : span(from)[0] - span(cell)[1];
    if (gap < -way / 2) continue;
    const apart = Math.max(0, cross(cell)[0] - cross(from)[1] + 1, cross(from)[0] - cross(cell)[1] + 1);
    const cost = Math.max(gap, 0) + 4 * apart + Math.abs(middle(cross(cell)) - middle(cross(from))) / 8;
    if (best === null || cost < best.cost) best = { cell, cost };
  }
  return best && best.cell;
}

class Picture {
  constructor(place) {
    const script = place.querySelector("script");
    this.figure = JSON.parse(script.textContent);
    script.remove();
    this.place = place;
    this.line = place.closest("figure").querySelector(".under");
    this.plot = place.appendChild(document.createElement("div"));
    this.plot.className = "plot";
    this.frame = place.appendChild(document.createElement("div"));
    this.frame.className = "cursor";
    this.frame.hidden = true;
    this.busy = Promise.resolve();
    this.at = null; // the key of the cell under the cursor
    const nested = this.figure.data.find((trace) => trace.type === "treemap");
    if (nested) {
      this.nested = nested;
      this.root = nested.ids[nested.parents.indexOf("")];
      this.level = this.root;
    }
    place.addEventListener("keydown", (event) => this.pressed(event));
    place.addEventListener("focus", () => place.matches(":focus-visible") && this.at === null && this.tell(this.hint()));
    place.addEventListener("blur", () => this.leave());
  }

  async draw(colours) {
    const first = !this.plot.on;
    const { data, layout } = painted(this.figure, colours);
    if (this.nested) data[0].level = this.level;
    // A finger that drags scrolls the page.
    await Plotly.react(this.plot, inked(data, layout), { hovermode: "closest", dragmode: touched.matches ? false : "zoom", ...layout }, {
      responsive: true,
      displayModeBar: touched.matches ? false : "hover",
      displaylogo: false,
      // By name: plotly has one that shares a chart on a server.
      modeBarButtons: [this.nested || !layout.xaxis ? ["toImage"] : ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    });
    this.place.dataset.drawn = "yes";
    if (!first) return;
    this.plot.on("plotly_afterplot", () => this.follow());
    this.plot.on("plotly_treemapclick", ({ nextLevel }) => {
      if (nextLevel !== undefined) this.zoom(nextLevel, null);
      return false; // plotly's own way there cannot be told to stand still
    });
  }

  hint() {
    return this.nested ? "Arrow keys move, Enter opens, Backspace leads back." : "Arrow keys move.";
  }

  tell(words) {
    this.line.textContent = words;
  }

  // What the cursor can be on: a place in pixels, a key that stays, and what to say.
  cells() {
    if (this.nested) return this.areas();
    const cells = this.plot._fullData.flatMap((trace, curve) => this.points(trace, curve));
    return cells.some((cell) => cell.line) ? cells : cells.sort((a, b) => (Math.abs(a.y - b.y) > 2 ? a.y - b.y : a.x - b.x));
  }

  areas() {
    const origin = this.place.getBoundingClientRect();
    const slices = new Map([...this.plot.querySelectorAll("g.slice")].map((slice) => [slice.__data__.data.id, slice]));
    const { ids, parents, hovertext } = this.nested;
    const inside = ids.map((id, index) => [id, index]).filter(([, index]) => parents[index] === this.level);
    return inside.filter(([id]) => slices.has(id)).map(([id, index]) => {
      const slice = slices.get(id);
      const box = slice.querySelector("path.surface").getBoundingClientRect();
      const { width, height } = box;
      return { key: id, x: box.x - origin.x, y: box.y - origin.y, width, height, words: said(hovertext[index]), slice };
    });
  }

  points(trace, curve) {
    const layout = this.plot._fullLayout;
    const [across, up] = [layout[(trace.xaxis || "x").replace("x", "xaxis")], layout[(trace.yaxis || "y").replace("y", "yaxis")]];
    if (!across || !up || trace.hoverinfo === "skip" || trace.visible !== true) return [];
    const cell = (point, x0, x1, y0, y1, label) => {
      const [x, y] = [Math.min(x0, x1) + across._offset, Math.min(y0, y1) + up._offset];
      const box = { x, y, width: Math.abs(x1 - x0), height: Math.abs(y1 - y0) };
      return { key: `${curve}/${point}`, curve, point, ...box, words: said(label), line: (trace.mode || "").includes("lines") };
    };
    const label = (index) => (Array.isArray(trace.hovertext) ? trace.hovertext[index] : trace.hovertext);
    let found = [];
    if (trace.type === "heatmap") {
      found = trace.z.flatMap((row, y) => [...row].flatMap((value, x) => (value === null || value === undefined || Number.isNaN(value) ? [] : [
        cell([y, x], across.r2p(x - 0.5), across.r2p(x + 0.5), up.r2p(y - 0.5), up.r2p(y + 0.5), trace.hovertext[y][x]),
      ])));
    } else if (trace.type === "bar") {
      const flat = trace.orientation === "h";
      found = this.plot.calcdata[curve].flatMap(({ p0, p1, b, s }, index) => {
        if (!s) return [];
        const [thick, long] = [[p0, p1], [b, b + s]];
        const [x, y] = flat ? [long, thick] : [thick, long];
        return [cell(index, ...x.map((v) => across.c2p(v)), ...y.map((v) => up.c2p(v)), label(index))];
      });
    } else if (trace.type === "scatter") {
      found = [...trace.x].flatMap((value, index) => {
        const words = label(index);
        const [x, y] = [across.d2p(value), up.d2p(trace.y[index])];
        if (!words || !Number.isFinite(x) || !Number.isFinite(y)) return [];
        return [cell(index, x - POINT / 2, x + POINT / 2, y - POINT / 2, y + POINT / 2, words)];
      });
    }
    // Those that a zoom has left in sight.
    return found.filter(({ x, y, width, height }) => {
      const [middle, centre] = [x + width / 2 - across._offset, y + height / 2 - up._offset];
      return middle > -1 && middle < across._length + 1 && centre > -1 && centre < up._length + 1;
    });
  }

  // One key after the other: opening takes its time.
  pressed(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target !== this.place || !KEYS.has(event.key)) return;
    event.preventDefault();
    this.busy = this.busy.then(() => this.act(event.key));
  }

  act(key) {
    const cells = this.cells();
    const index = cells.findIndex((cell) => cell.key === this.at);
    if (key === "Escape" || key === "Backspace") return this.up();
    if (key === "Enter" || key === " ") return this.nested && this.open(cells[index]);
    if (key === "Home" || key === "End") return this.go(cells.at(key === "Home" ? 0 : -1));
    return this.move(cells, index, ARROWS[key]);
  }

  move(cells, index, way) {
    if (index < 0) return this.go(cells[0]);
    const from = cells[index];
    if (from.line && way[0]) {
      const [next] = cells.filter((cell) => cell.curve === from.curve && cell.point === from.point + way[0]);
      return this.go(next || from);
    }
    if (from.line) { // the nearest line above or below, at the same place
      const others = cells.filter((cell) => cell.curve !== from.curve && Math.abs(cell.x - from.x) < 2);
      return this.go(beside(from, others, way) || beside(from, cells, way) || from);
    }
    // Areas too small to be seen are reached in their order.
    if (this.nested && way[0]) return this.go(cells[index + way[0]] || from);
    return this.go(beside(from, cells, way) || from);
  }

  go(cell) {
    if (!cell) return;
    this.leave();
    this.at = cell.key;
    this.tell(tiny(cell) ? `${cell.words} · too small to be drawn` : cell.words);
    this.follow(cell);
    if (!this.frame.hidden) this.frame.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.label(cell);
  }

  // plotly's own label of a cell, as for a mouse.
  label(cell) {
    if (cell.slice) cell.slice.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
    else if (Array.isArray(cell.point)) {
      const { l: left, t: top } = this.plot._fullLayout._size; // a heatmap knows no cell by its number
      Plotly.Fx.hover(this.plot, { xpx: cell.x + cell.width / 2 - left, ypx: cell.y + cell.height / 2 - top }, "xy");
    } else Plotly.Fx.hover(this.plot, [{ curveNumber: cell.curve, pointNumber: cell.point }]);
  }

  // The frame lies where its cell does, which may be on its way.
  follow(cell = this.at === null ? null : this.cells().find((each) => each.key === this.at)) {
    this.frame.hidden = !cell || tiny(cell);
    if (this.frame.hidden) return;
    const box = `translate(${cell.x - 2}px, ${cell.y - 2}px) ${cell.width} ${cell.height}`;
    this.frame.style.transform = `translate(${cell.x - 2}px, ${cell.y - 2}px)`;
    this.frame.style.width = `${Math.max(cell.width, 4) + 4}px`;
    this.frame.style.height = `${Math.max(cell.height, 4) + 4}px`;
    if (this.nested && box !== this.box) requestAnimationFrame(() => this.follow());
    this.box = box;
  }

  open(cell) {
    if (!cell) return;
    if (this.nested.parents.includes(cell.key)) return this.zoom(cell.key, "first");
    this.tell(`${cell.words} · nothing inside`);
  }

  up() {
    if (!this.nested || this.level === this.root) {
      this.leave();
      this.tell("");
      return;
    }
    const { ids, parents } = this.nested;
    return this.zoom(parents[ids.indexOf(this.level)], this.level);
  }

  // Show what is inside of an area; then the cursor is on the first there, on the one named, or gone.
  async zoom(level, then) {
    this.leave();
    this.level = level;
    const trace = [this.plot._fullData.findIndex((each) => each.type === "treemap")];
    const duration = still.matches ? 0 : 400;
    const options = { frame: { redraw: false, duration }, transition: { duration, easing: "cubic-in-out" }, mode: "immediate" };
    const frame = { data: [{ level }], traces: trace };
    // Settled, not resolved: whoever goes on in the meantime interrupts it.
    await Promise.allSettled([duration ? Plotly.animate(this.plot, frame, options) : Plotly.restyle(this.plot, { level }, trace)]);
    if (this.level !== level) return;
    const cells = this.cells();
    if (then !== null) this.go(cells.find((cell) => cell.key === then) || cells[0]);
    else this.tell(said(this.nested.hovertext[this.nested.ids.indexOf(level)]));
  }

  leave() {
    this.at = null;
    this.frame.hidden = true;
    if (!this.nested) return Plotly.Fx.unhover(this.plot);
    for (const slice of this.plot.querySelectorAll("g.slice")) slice.dispatchEvent(new MouseEvent("mouseout", { bubbles: true }));
  }
}

const pictures = [...document.querySelectorAll(".picture")].map((place) => new Picture(place));

// The hint stands where something is out of sight.
function hints() {
  for (const hint of document.querySelectorAll(".sideways")) {
    const area = hint.nextElementSibling;
    hint.style.display = area.scrollWidth > area.clientWidth ? "block" : "none";
  }
}

function draw() {
  const colours = getComputedStyle(document.documentElement);
  for (const picture of pictures) picture.draw(colours);
}

draw();
hints();
addEventListener("resize", hints);
addEventListener("toggle", hints, true); // what is folded away has no width
dark.addEventListener("change", draw);
