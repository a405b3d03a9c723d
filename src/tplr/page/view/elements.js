// Makes elements of HTML and SVG. Text is always set as text, never parsed as markup.

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
  return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" }, el("table", {},
    el("thead", {}, el("tr", {}, ...cells("th", heads))),
    el("tbody", {}, ...rows.map((row, at) => el("tr", onPick ? { class: "pick", click: () => onPick(at) } : {}, ...cells("td", row.map((value) => (typeof value === "number" ? String(value) : value))))))));
}

