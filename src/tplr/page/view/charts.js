// Charts: lines and stacked areas as SVG, strips of cells as canvas. Text is always set as text, never parsed as markup.

function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "color") node.style.setProperty("stroke", value);
    else if (name === "paint") node.style.setProperty("fill", value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const PALETTE = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)"];
const DASHES = ["", "7 4", "2 4", "10 3 2 3", "5 3", "1 3"];
const MARGIN = { top: 12, right: 14, bottom: 40, left: 58 };

function ticks(low, high, wanted) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

const extent = (values) => values.reduce(
  ([low, high], one) => (one === null || one === undefined ? [low, high] : [Math.min(low, one), Math.max(high, one)]), [Infinity, -Infinity]);

// What is drawn again when its place changes its width, or the theme changes.
const drawn = new Set();
const resized = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const chart = entry.target.chart;
    if (chart && Math.abs(chart.width - entry.contentRect.width) > 0.5) chart.draw();
  }
});

class Chart {
  constructor(host) {
    this.host = host;
    this.width = 0;
    host.classList.add("plot");
    host.chart = this;
    this.tip = el("div", { class: "tip", hidden: true });
    drawn.add(this);
    resized.observe(host);
  }

  // Places the tip beside a point, within the chart.
  showTip(x, y, ...children) {
    this.tip.replaceChildren(...children);
    this.tip.hidden = false;
    const { offsetWidth: width } = this.tip;
    const left = x + 16 + width > this.width ? Math.max(0, x - 16 - width) : x + 16;
    this.tip.style.setProperty("left", `${left}px`);
    this.tip.style.setProperty("top", `${Math.max(0, y)}px`);
  }

  hideTip() {
    this.tip.hidden = true;
  }
}

// Lines, or areas one on the other, over the windows.
class LineChart extends Chart {
  // options: x() → positions; xName; format(x); yName, yFormat(value, decimals), exact(value); series [{name, values, color, dash, kind}]; stacked;
  // low, high: limits of y; height; onPick(index); title.
  constructor(host, options) {
    super(host);
    this.options = options;
    this.index = 0;
  }

  draw() {
    const { options, host } = this;
    this.width = host.clientWidth;
    if (!this.width) return;
    const height = options.height ?? 260;
    const x = options.x();
    const shown = options.series();
    const [lowX, highX] = extent(x);
    let [low, high] = options.stacked ? [0, 1] : extent(shown.flatMap((one) => extent(one.values)).filter(Number.isFinite));
    if (!Number.isFinite(low)) [low, high] = [0, 1];
    low = Math.min(low, options.low ?? low);
    high = Math.max(high, options.high ?? high);
    if (high - low < 1e-9) [low, high] = [low - (low && options.low === undefined ? 0.5 : 0), high + 0.5];
    else if (!options.stacked) high += (high - low) * 0.04;
    if (options.low === undefined) low -= (high - low) * 0.04;
    const right = this.width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    const spanX = highX > lowX ? highX - lowX : 1;
    this.toX = (value) => (highX > lowX ? MARGIN.left + ((value - lowX) / spanX) * (right - MARGIN.left) : (MARGIN.left + right) / 2);
    this.toY = (value) => bottom - ((value - low) / (high - low)) * (bottom - MARGIN.top);
    this.at = x.map(this.toX);
    const axis = svg("g", { class: "axis" });
    const levels = ticks(low, high, 5);
    const decimals = levels.length > 1 ? Math.max(0, -Math.floor(Math.log10(levels[1] - levels[0]) + 1e-9)) : 2;
    for (const tick of levels) {
      axis.append(
        svg("line", { x1: MARGIN.left, x2: right, y1: this.toY(tick), y2: this.toY(tick) }),
        svg("text", { x: MARGIN.left - 9, y: this.toY(tick) + 4, "text-anchor": "end" }, options.yFormat(tick, decimals)));
    }
    const whole = options.whole?.() ?? true;
    for (const tick of ticks(lowX, highX, Math.max(2, Math.floor(this.width / 110)))) {
      if (whole && !Number.isInteger(tick)) continue;
      axis.append(svg("text", { x: this.toX(tick), y: bottom + 18, "text-anchor": "middle" }, options.format(tick)));
    }
    axis.append(
      svg("line", { class: "base", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }),
      svg("text", { class: "name", x: (MARGIN.left + right) / 2, y: height - 4, "text-anchor": "middle" }, options.xName()),
      svg("text", { class: "name", "text-anchor": "middle", transform: `translate(13 ${(MARGIN.top + bottom) / 2}) rotate(-90)` }, options.yName));
    const lines = options.stacked ? this.areas(shown) : this.lines(shown);
    this.cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: bottom });
    this.hover = svg("line", { class: "hover", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
    const image = svg("svg", {
      height, viewBox: `0 0 ${this.width} ${height}`, role: "img", "aria-label": options.title,
      pointermove: (event) => this.point(event), pointerleave: () => this.leave(),
      click: (event) => options.onPick(this.nearest(event)),
    }, axis, ...lines, this.hover, this.cursor);
    image.style.setProperty("height", `${height}px`);
    host.replaceChildren(image, this.tip);
    this.select(this.index);
  }

  lines(series) {
    return series.flatMap((one) => {
      let path = "";
      let open = false;
      const points = [];
      one.values.forEach((value, index) => {
        if (value === null || value === undefined) {
          open = open && one.connect === true;
          return;
        }
        const [x, y] = [this.at[index].toFixed(1), this.toY(value).toFixed(1)];
        path += `${open ? "L" : "M"}${x} ${y}`;
        open = true;
        points.push([x, y]);
      });
      const line = svg("path", { class: `series ${one.kind ?? ""}`, d: path, color: one.color, "stroke-dasharray": one.dash || null });
      const dots = points.length <= 60 && one.kind !== "faint"
        ? points.map(([cx, cy]) => svg("circle", { cx, cy, r: one.kind === "strong" ? 3 : 2.2, paint: one.color })) : [];
      return [line, ...dots];
    });
  }

  areas(series) {
    const base = new Float64Array(this.at.length);
    return series.map((one) => {
      const [up, down] = [[], []];
      const flush = [];
      const close = () => {
        if (up.length) flush.push(`M${[...up.splice(0), ...down.splice(0).reverse()].join("L")}Z`);
      };
      one.values.forEach((value, index) => {
        if (value === null || value === undefined) return close();
        const half = this.at.length > 1 ? 0 : 20;
        const [x, y0] = [this.at[index], base[index]];
        base[index] += value;
        for (const shift of half ? [-half, half] : [0]) {
          up.push(`${(x + shift).toFixed(1)} ${this.toY(base[index]).toFixed(1)}`);
          down.push(`${(x + shift).toFixed(1)} ${this.toY(y0).toFixed(1)}`);
        }
      });
      close();
      return svg("path", { d: flush.join(""), paint: one.color, stroke: "var(--card)", "stroke-width": 0.6 });
    });
  }

  nearest(event) {
    const x = event.clientX - this.host.getBoundingClientRect().left;
    let best = 0;
    this.at.forEach((one, index) => {
      if (Math.abs(one - x) < Math.abs(this.at[best] - x)) best = index;
    });
    return best;
  }

  point(event) {
    const index = this.nearest(event);
    this.hover.setAttribute("x1", this.at[index]);
    this.hover.setAttribute("x2", this.at[index]);
    this.hover.setAttribute("visibility", "visible");
    const known = this.options.series().filter((one) => one.values[index] !== null && one.values[index] !== undefined && !one.untold);
    const rows = known.slice(0, 14).map((one) => el("span", {}, el("i", {}, one.name), this.options.exact(one.values[index])));
    if (known.length > 14) rows.push(el("span", {}, el("i", {}, `and ${known.length - 14} more`)));
    this.showTip(this.at[index], event.clientY - this.host.getBoundingClientRect().top - 20, el("b", {}, this.options.name(index)), ...rows);
  }

  leave() {
    this.hover.setAttribute("visibility", "hidden");
    this.hideTip();
  }

  select(index) {
    this.index = index;
    if (!this.at) return;
    this.cursor.setAttribute("x1", this.at[index]);
    this.cursor.setAttribute("x2", this.at[index]);
  }
}

// A row of cells for each participant, a column for each window.
const ROW = 22;
const NEAR = 16; // width of a cell when not all windows fit
class Strip extends Chart {
  // options: rows() [{name, title}], count, name(index), cell(row, index) → kind; kinds {kind: {color, alpha, glyph, text,
  // rare}}; tell(row, index) → [[name, text]]; onPick(row, index); title.
  constructor(host, options) {
    super(host);
    this.options = options;
    this.index = 0;
    this.row = null;
    this.near = false;
    this.canvas = el("canvas", {
      role: "img", "aria-label": options.title, tabindex: options.onPick ? "0" : null,
      pointermove: (event) => this.point(event), pointerleave: () => this.hideTip(),
      click: (event) => this.pick(event),
    });
    host.replaceChildren(this.canvas, this.tip);
  }

  get fits() {
    return this.options.count * 9 <= this.width - this.left;
  }

  // Lays out and paints all cells, once for a width, a theme or a colouring.
  draw() {
    const { options, canvas, host } = this;
    this.width = host.clientWidth;
    if (!this.width) return;
    this.style = getComputedStyle(document.documentElement);
    this.font = getComputedStyle(document.body).fontFamily;
    const rows = options.rows();
    const pen = canvas.getContext("2d");
    pen.font = `12.5px ${this.font}`;
    this.left = Math.min(this.width * 0.32, 14 + Math.max(0, ...rows.map((row) => pen.measureText(row.name).width)));
    const room = this.width - this.left - 4;
    const near = this.near && !this.fits;
    this.cellWidth = near ? NEAR : Math.min(30, room / options.count);
    const visible = near ? Math.max(1, Math.floor(room / this.cellWidth)) : options.count;
    this.from = near ? Math.max(0, Math.min(options.count - visible, this.index - (visible >> 1))) : 0;
    this.until = Math.min(options.count, this.from + visible);
    this.height = rows.length * ROW + 24;
    this.scale = window.devicePixelRatio || 1;
    this.cells = document.createElement("canvas");
    for (const one of [canvas, this.cells]) {
      one.width = Math.round(this.width * this.scale);
      one.height = Math.round(this.height * this.scale);
    }
    canvas.style.setProperty("height", `${this.height}px`);
    this.paintCells(this.penOf(this.cells), rows);
    this.compose(rows);
  }

  penOf(canvas) {
    const pen = canvas.getContext("2d");
    pen.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    pen.font = `12.5px ${this.font}`;
    pen.textBaseline = "middle";
    return pen;
  }

  color(name) {
    return this.style.getPropertyValue(name).trim();
  }

  paintCells(pen, rows) {
    const { kinds, cell } = this.options;
    const colors = new Map(Object.values(kinds).map((look) => [look.color, this.color(look.color)]));
    const ground = this.color("--card");
    const gap = this.cellWidth >= 8 ? 2 : this.cellWidth >= 4 ? 1 : 0;
    const rare = [];
    const one = (look, alpha, index, at) => paint(pen, look, { alpha, ground, color: colors.get(look.color) }, this.toX(index), at * ROW + 2,
      Math.max(this.cellWidth - gap, look.rare ? 1.5 : 1), ROW - 4);
    for (let at = 0; at < rows.length; at += 1) {
      for (let index = this.from; index < this.until; index += 1) {
        const kind = cell(at, index);
        const look = kind && kinds[kind.kind ?? kind];
        if (!look) continue;
        const alpha = kind.alpha ?? look.alpha ?? 1;
        if (look.rare) rare.push([look, alpha, index, at]);
        else one(look, alpha, index, at);
      }
    }
    // Last, and never narrower than a line, so that many windows do not hide them.
    for (const cellOf of rare) one(...cellOf);
  }

  // The painted cells, the names, the scale below, and the selection.
  compose(rows) {
    const pen = this.penOf(this.canvas);
    pen.clearRect(0, 0, this.width, this.height);
    pen.drawImage(this.cells, 0, 0, this.width, this.height);
    rows.forEach((row, at) => {
      pen.fillStyle = this.color(at === this.row ? "--text" : "--muted");
      pen.fillText(fitted(pen, row.name, this.left - 12), 0, at * ROW + ROW / 2);
    });
    pen.fillStyle = this.color("--muted");
    pen.font = `12px ${this.font}`;
    pen.textAlign = "center";
    const [first, last] = [this.options.number(this.from), this.options.number(this.until - 1)];
    for (const tick of ticks(first, last, Math.max(2, Math.floor((this.width - this.left) / 90)))) {
      if (Number.isInteger(tick)) pen.fillText(String(tick), this.toX(this.from + tick - first) + this.cellWidth / 2, rows.length * ROW + 14);
    }
    pen.textAlign = "left";
    if (this.index < this.from || this.index >= this.until) return;
    const [x, width] = [this.toX(this.index), Math.max(2, this.cellWidth - (this.cellWidth >= 8 ? 2 : 0))];
    pen.strokeStyle = this.color("--text");
    pen.lineWidth = 1;
    pen.globalAlpha = 0.4;
    pen.strokeRect(x - 1.5, 0.5, width + 3, rows.length * ROW - 1);
    pen.globalAlpha = 1;
    if (this.row === null || this.row < 0) return;
    pen.lineWidth = 2;
    pen.strokeRect(x - 1, this.row * ROW + 1, width + 2, ROW - 2);
  }

  toX(index) {
    return this.left + (index - this.from) * this.cellWidth;
  }

  place(event) {
    const box = this.host.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / ROW);
    const index = this.from + Math.floor((event.clientX - box.left - this.left) / this.cellWidth);
    const inside = row >= 0 && row < this.options.rows().length && index >= this.from && index < this.until;
    return inside ? { row, index } : null;
  }

  pick(event) {
    const found = this.place(event);
    if (found && this.options.onPick) this.options.onPick(found.row, found.index);
  }

  point(event) {
    const found = this.place(event);
    if (!found) return this.hideTip();
    const rows = this.options.tell(found.row, found.index).map(([name, text]) => el("span", {}, el("i", {}, name), text));
    const title = `${this.options.rows()[found.row].name}, ${this.options.name(found.index)}`;
    this.showTip(this.toX(found.index) + this.cellWidth, found.row * ROW + ROW, el("b", {}, title), ...rows);
    return undefined;
  }

  select(index, row = this.row) {
    this.index = index;
    this.row = row;
    if (!this.width) return;
    if (this.near && !this.fits) this.draw();
    else this.compose(this.options.rows());
  }
}

function paint(pen, look, { alpha, color, ground }, x, y, width, height) {
  pen.globalAlpha = alpha;
  if (look.hollow && width >= 6) {
    pen.strokeStyle = color;
    pen.lineWidth = 1.5;
    pen.strokeRect(x + 0.75, y + 0.75, width - 1.5, height - 1.5);
  } else {
    pen.fillStyle = color;
    pen.fillRect(x, y, width, height);
  }
  pen.globalAlpha = 1;
  if (look.glyph && width >= 7) {
    pen.fillStyle = look.hollow ? color : ground;
    pen.textAlign = "center";
    pen.font = "bold 13px system-ui, sans-serif";
    pen.fillText(look.glyph, x + width / 2, y + height / 2 + 0.5);
    pen.textAlign = "left";
  }
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let cut = text;
  while (cut && pen.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
  return `${cut}…`;
}

// Legends: of lines, and of cells.
function lineLegend(series) {
  return el("ul", { class: "legend" }, ...series.filter((one) => !one.unnamed).map((one) => el("li", {},
    svg("svg", { width: 26, height: 12, "aria-hidden": "true" }, one.area
      ? svg("rect", { width: 14, height: 12, rx: 3, paint: one.color })
      : svg("line", { x1: 1, x2: 25, y1: 6, y2: 6, color: one.color, "stroke-width": one.kind === "strong" ? 3 : 2, "stroke-dasharray": one.dash || null })),
    one.name)));
}

function cellLegend(kinds, present) {
  return el("ul", { class: "legend" }, ...present.map((kind) => {
    const look = kinds[kind];
    const box = svg("svg", { width: 18, height: 18, "aria-hidden": "true" });
    if (look.hollow) box.append(svg("rect", { x: 1.5, y: 1.5, width: 15, height: 15, color: `var(${look.color})`, fill: "none", "stroke-width": 1.5 }));
    else box.append(svg("rect", { width: 18, height: 18, paint: `var(${look.color})`, opacity: look.alpha ?? 1 }));
    if (look.glyph) {
      box.append(svg("text", { x: 9, y: 13.5, "text-anchor": "middle", "font-size": 13, "font-weight": 700, paint: look.hollow ? `var(${look.color})` : "var(--card)" }, look.glyph));
    }
    return el("li", {}, box, look.text);
  }));
}

// The numbers behind a chart, made when somebody opens them.
function dataTable(heads, rows) {
  const details = el("details", {}, el("summary", {}, "Show the numbers"));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(table(heads, rows()));
  });
  return details;
}

function table(heads, rows, onPick = null) {
  const numeric = heads.map((_, at) => rows.length > 0 && rows.every((row) => typeof row[at] === "number" || row[at] === null || /^[−+]?[\d\s.,]+( %)?$/.test(row[at] ?? "")));
  const cells = (tag, values) => values.map((value, at) => el(tag, { class: numeric[at] ? "number" : null, scope: tag === "th" ? "col" : null }, value instanceof Node ? value : value ?? "–"));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, el("table", {},
    el("thead", {}, el("tr", {}, ...cells("th", heads))),
    el("tbody", {}, ...rows.map((row, at) => el("tr", onPick ? { class: "pick", click: () => onPick(at) } : {}, ...cells("td", row.map((value) => (typeof value === "number" ? String(value) : value))))))));
}

