// Reads the embedded document, and unpacks explanations (docs/page.md has the format).

async function readDocument() {
  const base64 = document.getElementById("document").textContent;
  const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64); // browsers of 2025 and later
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
  return bytes;
}

// The rows [name, sentence] of a miner's cell, as packed by tplr/page/sentences.py.
class Explanations {
  constructor(packed) {
    this.packed = packed;
    this.uids = Object.keys(packed.cells).map(Number);
    this.columns = new Map(); // "template,place" → the numbers themselves
    this.ranks = new Map(); // template → sentences of it before each cell
  }

  rows(uid, index) {
    const cell = this.cell(uid, index);
    const shape = this.packed.cells[uid]?.[index] ?? -1;
    if (shape < 0) return null;
    const seen = new Map();
    return this.packed.shapes[shape].map((number) => {
      const template = this.packed.templates[number];
      const earlier = seen.get(number) ?? 0;
      seen.set(number, earlier + 1);
      const place = this.rank(number)[cell] + earlier;
      let text = template.parts[0];
      template.numbers.forEach((column, at) => {
        const value = column.same
          ? this.column(...column.same)[this.rank(column.same[0])[cell]]
          : this.column(number, at)[place];
        text += printed(value, template.decimals[at]) + template.parts[at + 1];
      });
      return [this.packed.names[template.name], text];
    });
  }

  cell(uid, index) {
    const count = this.packed.cells[uid]?.length ?? 0;
    return this.uids.indexOf(Number(uid)) * count + index;
  }

  column(template, place) {
    const key = `${template},${place}`;
    if (!this.columns.has(key)) {
      let sum = 0;
      const deltas = this.packed.templates[template].numbers[place].deltas;
      this.columns.set(key, Float64Array.from(deltas, (delta) => (sum += delta)));
    }
    return this.columns.get(key);
  }

  rank(template) {
    if (!this.ranks.has(template)) {
      const perShape = this.packed.shapes.map((shape) => shape.filter((one) => one === template).length);
      const ranks = [];
      let count = 0;
      for (const uid of this.uids) {
        for (const shape of this.packed.cells[uid]) {
          ranks.push(count);
          if (shape >= 0) count += perShape[shape];
        }
      }
      this.ranks.set(template, Uint32Array.from(ranks));
    }
    return this.ranks.get(template);
  }
}

function printed(value, decimals) {
  const digits = String(value).padStart(decimals + 1, "0");
  return decimals ? `${digits.slice(0, -decimals)}.${digits.slice(-decimals)}` : digits;
}

