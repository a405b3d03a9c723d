// Strips of cells, as canvas.

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
    const one = ({ look, alpha, from, until }, at) => paint(pen, look, { alpha, ground, color: colors.get(look.color) }, this.toX(from), at * ROW + 2,
      Math.max((until - from) * this.cellWidth - gap, look.rare ? 1.5 : 1), ROW - 4);
    for (let at = 0; at < rows.length; at += 1) {
      let run = null;
      for (let index = this.from; index < this.until; index += 1) {
        const kind = cell(at, index);
        const look = kind && kinds[kind.kind ?? kind];
        const alpha = look && (kind.alpha ?? look.alpha ?? 1);
        // Equal neighbours without a gap are one rectangle.
        if (run && !gap && look === run.look && alpha === run.alpha && !look.rare) {
          run.until = index + 1;
          continue;
        }
        if (run) one(run, at);
        run = look ? { look, alpha, from: index, until: index + 1 } : null;
        if (look?.rare) {
          rare.push([run, at]);
          run = null;
        }
      }
      if (run) one(run, at);
    }
    // Last, and never narrower than a line, so that many windows do not hide them.
    for (const [run, at] of rare) one(run, at);
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

