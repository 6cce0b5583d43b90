"use strict";
(() => {
  const RUN = JSON.parse(document.getElementById("data").textContent);
  const PAGE = window.matchMedia("(max-width: 60rem)").matches ? 10 : 25;
  const FORMATS = [["float16", "fp16"], ["bfloat16", "bf16"]];
  const number = new Intl.NumberFormat("en");
  const narrow = window.matchMedia("(max-width: 60rem)");
  const redraws = [];

  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  };
  const colour = (name) => `var(--${name}, var(--other))`;
  const bytes = (size) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    for (; size >= 1024 && unit < units.length - 1; unit++) size /= 1024;
    return `${size.toLocaleString("en", { maximumFractionDigits: unit ? 1 : 0 })} ${units[unit]}`;
  };
  const count = (value) => (value === null || value === undefined ? "" : number.format(value));
  const short = (op) => op.replace(/^torch\.(nn\.functional\.)?/, "").replace(/^aten::/, "");
  /* An operator, with the listed function that called it where that has another name. */
  const named = ({ op, within }) => (within && short(within) !== short(op) ? `${short(within)} (${short(op)})` : short(op));
  const dtypes = (found) => Object.keys(found).sort().join(" ") || "-";
  const power = (exponent) => `2^${exponent}`;
  const scaleText = (exponent) => `${power(exponent)} = ${number.format(2 ** exponent)}`;

  /* A table with a filter, sorting and pages. Columns: {name, value(row), text(row), number, button(row), code}. */
  class Table {
    constructor(place, columns, rows, { label, sort = null, empty = "Nothing." }) {
      this.columns = columns;
      this.rows = rows;
      this.page = 0;
      this.sort = sort || { column: 0, down: false };
      this.found = null;
      if (!rows.length) {
        place.append(make("p", {}, empty));
        return;
      }
      this.filter = make("input", { type: "search", placeholder: "Filter", "aria-label": `Filter ${label}` });
      this.status = make("span", { role: "status" });
      this.back = make("button", { type: "button" }, "Previous");
      this.next = make("button", { type: "button" }, "Next");
      this.body = make("tbody");
      this.heads = columns.map((column, index) => {
        const head = make("th", { scope: "col", class: column.number ? "number" : null });
        if (column.button) head.append(column.name);
        else {
          const button = make("button", { type: "button" }, column.name);
          button.addEventListener("click", () => this.by(index));
          head.append(button);
        }
        return head;
      });
      const table = make("table", { class: "cards sorted", "aria-label": label },
        make("thead", {}, make("tr", {}, ...this.heads)), this.body);
      place.append(make("div", { class: "tools" }, this.filter, this.status, this.back, this.next), table);
      this.filter.addEventListener("input", () => { this.page = 0; this.found = null; this.show(); });
      this.back.addEventListener("click", () => { this.page--; this.show(); });
      this.next.addEventListener("click", () => { this.page++; this.show(); });
      this.show();
    }

    by(index) {
      const same = this.sort.column === index;
      this.sort = { column: index, down: same ? !this.sort.down : Boolean(this.columns[index].number) };
      this.page = 0;
      this.found = null;
      this.show();
    }

    text(row, column) {
      return String(column.text ? column.text(row) : column.value(row) ?? "");
    }

    select() {
      const wanted = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const told = this.columns.filter((column) => !column.button);
      const found = this.rows.filter((row) => {
        if (!wanted.length) return true;
        row.searched ??= told.map((column) => this.text(row.data, column)).join("\n").toLowerCase();
        return wanted.every((word) => row.searched.includes(word));
      });
      const { column, down } = this.sort;
      const value = (row) => this.columns[column].value(row.data);
      const compare = (a, b) => {
        const [one, other] = [value(a), value(b)];
        // Unknown values come last in both orders.
        if (one === null || one === undefined) return other === null || other === undefined ? 0 : 1;
        if (other === null || other === undefined) return -1;
        const order = typeof one === "number" ? one - other : String(one).localeCompare(String(other), "en");
        return down ? -order : order;
      };
      return found.sort(compare);
    }

    show() {
      this.found ??= this.select();
      const pages = Math.max(1, Math.ceil(this.found.length / PAGE));
      this.page = Math.min(Math.max(this.page, 0), pages - 1);
      const from = this.page * PAGE;
      const shown = this.found.slice(from, from + PAGE);
      this.body.replaceChildren(...shown.map(({ data }) => make("tr", {}, ...this.columns.map((column) => {
        const kind = [column.number ? "number" : "", column.code ? "code" : ""].join(" ").trim();
        const cell = make("td", { "data-label": column.name, class: kind || null });
        if (column.button) cell.append(column.button(data));
        // A name may be broken after a dot, a slash or an underscore, and nowhere else.
        else if (column.code) cell.append(...this.text(data, column).split(/(?<=[./_])/).flatMap((part) => [part, make("wbr")]));
        else cell.append(this.text(data, column));
        return cell;
      }))));
      this.heads.forEach((head, index) => {
        if (index === this.sort.column) head.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      const to = from + shown.length;
      this.status.textContent = shown.length
        ? `${number.format(from + 1)} to ${number.format(to)} of ${number.format(this.found.length)}` : "0 rows";
      this.back.disabled = this.page === 0;
      this.next.disabled = this.page >= pages - 1;
    }
  }
  const table = (place, columns, rows, options) => new Table(place, columns, rows.map((data) => ({ data })), options);

  const shape = (tag, attributes = {}, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const said = (text) => shape("title", {}, text);
  /* At most so many round numbers from low to high. */
  const ticks = (low, high, most = 8) => {
    const rough = Math.max((high - low) / most, 1e-9);
    const unit = 10 ** Math.floor(Math.log10(rough));
    const apart = [1, 2, 5, 10].map((times) => times * unit).find((step) => step >= rough);
    const found = [];
    for (let at = Math.ceil(low / apart) * apart; at <= high + 1e-9; at += apart) found.push(Number(at.toPrecision(6)));
    return found;
  };
  /* A chart: a legend and axes. x and y: {low, high, ticks: [[value, text], ...], title}. Returns the drawing, and
     functions from values to places in it. */
  const axes = (place, x, y, series, left = 64) => {
    const [width, height] = [Math.max(place.clientWidth, 280), place.classList.contains("tall") ? 416 : 320];
    const [top, right, bottom] = [12, 16, 48];
    const atX = (value) => left + ((value - x.low) / (x.high - x.low || 1)) * (width - left - right);
    const atY = (value) => height - bottom - ((value - y.low) / (y.high - y.low || 1)) * (height - top - bottom);
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
    const text = (at, down, words, anchor) => shape("text", { x: at, y: down, "text-anchor": anchor }, words);
    for (const [value, words] of x.ticks) {
      svg.append(shape("line", { class: "grid", x1: atX(value), x2: atX(value), y1: top, y2: height - bottom }));
      svg.append(text(atX(value), height - bottom + 18, words, "middle"));
    }
    for (const [value, words] of y.ticks) {
      svg.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: atY(value), y2: atY(value) }));
      svg.append(text(left - 6, atY(value) + 4, words, "end"));
    }
    svg.append(text((left + width - right) / 2, height - 8, x.title, "middle"));
    if (y.title) {
      const middle = (top + height - bottom) / 2;
      svg.append(shape("text", { transform: `translate(14 ${middle}) rotate(-90)`, "text-anchor": "middle" }, y.title));
    }
    const legend = make("p", { class: "key" }, ...series.map(([name, color]) => {
      const swatch = make("span", { class: "swatch" });
      swatch.style.background = color;
      return make("span", {}, swatch, name);
    }));
    place.replaceChildren(legend, svg);
    const group = (name) => {
      const found = shape("g", { "data-series": name });
      svg.append(found);
      return found;
    };
    return { svg, atX, atY, group };
  };
  const numbered = (values) => values.map((value) => [value, number.format(value)]);
  const drawn = (make_it) => {
    redraws.push(make_it);
    make_it();
  };

  const timeline = (place, run) => {
    const known = run.timeline.scales.filter(([, scale]) => typeof scale === "number" && scale > 0);
    if (!known.length) return void place.replaceWith(make("p", {}, "No loss scale was seen."));
    const points = known.map(([step, scale]) => [step, Math.log2(scale)]);
    const last = points.at(-1);
    if (last[0] < run.timeline.steps) points.push([run.timeline.steps, last[1]]);
    const levels = points.map(([, level]) => level);
    const [low, high] = [Math.floor(Math.min(...levels)) - 1, Math.ceil(Math.max(...levels)) + 1];
    const apart = Math.ceil((high - low) / 8);
    const levels_shown = [];
    for (let at = low; at <= high; at += apart) levels_shown.push(at);
    drawn(() => {
      const names = Object.fromEntries(run.skips.groups.map((group) => [group.kind, group.name]));
      const kinds = Object.entries(names).map(([kind, name]) => [
        kind, `skip: ${name}`, run.skips.events.filter((event) => event.kind === kind),
      ]);
      const end = Math.max(run.timeline.steps, 1);
      const { atX, atY, group } = axes(place,
        { low: 0, high: end, ticks: numbered(ticks(0, end).filter(Number.isInteger)), title: "step" },
        { low, high, ticks: levels_shown.map((at) => [at, power(at)]), title: "loss scale" },
        [["loss scale", colour("ink")], ...kinds.map(([kind, name]) => [name, colour(kind)])]);
      const line = points.map(([step, level], at) => (at ? `H${atX(step)}V${atY(level)}` : `M${atX(step)},${atY(level)}`));
      group("loss scale").append(shape("path", { d: line.join(""), class: "line" }));
      for (const [kind, name, events] of kinds) {
        group(name).append(...events.map((event) => {
          const level = event.scale > 0 ? Math.log2(event.scale) : low;
          const mark = { cx: atX(event.step), cy: atY(level), r: 5, style: `fill: ${colour(kind)}` };
          return shape("circle", mark, said(`step ${event.step}: ${name}`));
        }));
      }
    });
  };

  const sum = (several) => {
    const total = { exponents: {}, zeros: 0, nonfinite: 0 };
    for (const one of several) {
      for (const [exponent, found] of Object.entries(one.exponents)) {
        total.exponents[exponent] = (total.exponents[exponent] || 0) + found;
      }
      total.zeros += one.zeros;
      total.nonfinite += one.nonfinite;
    }
    return total;
  };
  const elements = (found) => Object.values(found.exponents).reduce((a, b) => a + b, found.zeros + found.nonfinite);
  const lost = (found, [zero, normal, top], shift) => {
    const result = { underflow: 0, subnormal: 0, overflow: 0 };
    for (const [text, many] of Object.entries(found.exponents)) {
      const exponent = Number(text) + shift;
      if (exponent < zero) result.underflow += many;
      else if (exponent < normal) result.subnormal += many;
      if (exponent >= top) result.overflow += many;
    }
    return result;
  };

  const exponents = (pane, run) => {
    const place = pane.querySelector("[data-chart=exponents]");
    if (!place) return;
    const slider = pane.querySelector(".scale");
    const all = { result: sum(run.values.ops), gradient: sum(run.values.gradients) };
    let chosen = { ...all, name: null };
    const start = typeof run.values.loss_scale === "number" ? Math.round(Math.log2(run.values.loss_scale)) : 0;
    slider.value = String(Math.min(24, Math.max(0, start)));

    const bars = (found, shift) => {
      const total = elements(found) || 1;
      const known = Object.keys(found.exponents).map(Number).sort((a, b) => a - b);
      return [known.map((exponent) => exponent + shift), known.map((exponent) => (100 * found.exponents[exponent]) / total)];
    };
    const paint = () => {
      const shift = Number(slider.value);
      const series = [
        ["results", "bfloat16", bars(chosen.result, 0)], ["gradients times scale", "half_precision_op", bars(chosen.gradient, shift)],
      ].filter(([, , [x]]) => x.length);
      const [x, y] = [0, 1].map((part) => series.flatMap(([, , values]) => values[part]));
      const most = Math.max(1, ...y);
      const [zero, normal, top] = run.values.formats.float16;
      const [bzero, bnormal, btop] = run.values.formats.bfloat16;
      const low = Math.min(zero - 6, ...x) - 1;
      const high = Math.max(top + 6, ...x) + 1;
      const { svg, atX, atY, group } = axes(place,
        { low, high, ticks: ticks(low, high, 12).map((at) => [at, String(at)]), title: "binary exponent" },
        { low: 0, high: most * 1.32, ticks: numbered(ticks(0, most, 6)), title: "% of elements" },
        series.map(([name, color]) => [name, colour(color)]));
      const band = (from, to, bottom, up, name, strength, words) => {
        const [left, right] = [Math.max(from, low) - 0.5, Math.min(to, high) - 0.5].map(atX);
        svg.append(shape("rect", {
          x: left, y: atY(most * up), width: Math.max(right - left, 0), height: atY(most * bottom) - atY(most * up),
          style: `fill: ${colour(name)}; opacity: ${strength}`,
        }));
        if (words) svg.append(shape("text", { x: left + 4, y: atY(most * up) + 14 }, words));
      };
      band(normal, top, 0, 1.14, "float16", 0.16, "fp16: normal");
      band(zero, normal, 0, 1.14, "float16", 0.07, narrow.matches ? "" : "subnormal");
      band(bnormal, btop, 1.18, 1.3, "bfloat16", 0.35, "bf16: normal");
      band(bzero, bnormal, 1.18, 1.3, "bfloat16", 0.15, "");
      for (const [name, color, [exponents, shares]] of series) {
        group(name).append(...exponents.map((exponent, index) => shape("rect", {
          x: atX(exponent - 0.45), width: atX(0.9) - atX(0), y: atY(shares[index]), height: atY(0) - atY(shares[index]),
          style: `fill: ${colour(color)}; opacity: 0.75`, "data-x": exponent,
        }, said(`${name}, 2^${exponent}: ${shares[index].toPrecision(3)} %`))));
      }
      pane.querySelector(".scale-out").textContent = scaleText(shift);
      slider.setAttribute("aria-valuetext", scaleText(shift));
      tell(shift);
    };
    const tell = (shift) => {
      const rows = [];
      for (const [what, found, by] of [["results", chosen.result, 0], ["gradients", chosen.gradient, shift]]) {
        const total = elements(found);
        if (!total) continue;
        for (const [dtype, name] of FORMATS) {
          const { underflow, subnormal, overflow } = lost(found, run.values.formats[dtype], by);
          const share = (many) => many === 0 ? "0" : `${count(many)} (${((100 * many) / total).toPrecision(2)} %)`;
          rows.push([`${what} in ${name}`, share(underflow), share(subnormal), share(overflow), count(found.zeros), count(found.nonfinite)]);
        }
      }
      const heads = ["", "become 0", "subnormal", "overflow", "are 0", "inf or nan"];
      const title = chosen.name ? make("p", {}, `Shown: ${chosen.name}. `) : make("p", {}, "Shown: all results and gradients. ");
      if (chosen.name) {
        const button = make("button", { type: "button", class: "all" }, "Show all");
        button.addEventListener("click", () => { chosen = { ...all, name: null }; paint(); slider.focus(); });
        title.append(button);
      }
      pane.querySelector(".losses").replaceChildren(title, make("table", { class: "cards numbers" },
        make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col", class: head ? "number" : null }, head)))),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell, index) =>
          make(index ? "td" : "th", index ? { "data-label": heads[index], class: "number" } : { scope: "row" }, cell)))))));
    };
    slider.addEventListener("input", paint);
    drawn(paint);

    const nothing = { exponents: {}, zeros: 0, nonfinite: 0 };
    const rows = [
      ...run.values.gradients.map((one) => ({ ...one, what: "gradient", name: one.parameter })),
      ...run.values.ops.map((one) => ({ ...one, what: "result", name: named(one) })),
    ];
    table(pane.querySelector("[data-table=values]"), [
      { name: "of", value: (row) => row.what },
      { name: "parameter or op", value: (row) => row.name, code: true },
      { name: "module", value: (row) => row.module ?? "", code: true },
      { name: "called at", value: (row) => row.location ?? "", code: true },
      { name: "largest", value: (row) => row.largest, text: (row) => (row.largest === null ? "" : power(row.largest)), number: true },
      { name: "are 0", value: (row) => row.zeros, text: (row) => count(row.zeros), number: true },
      { name: "inf or nan", value: (row) => row.nonfinite, text: (row) => count(row.nonfinite), number: true },
      { name: "histogram", value: () => null, button: (row) => {
        const button = make("button", { type: "button", "aria-label": `Plot ${row.name}` }, "Plot");
        button.addEventListener("click", () => {
          const name = `${row.what} ${row.name}${row.location ? ` at ${row.location}` : ""}`;
          chosen = { result: nothing, gradient: nothing, [row.what]: row, name };
          paint();
          place.scrollIntoView({ block: "center" });
        });
        return button;
      } },
    ], rows, { label: "values", sort: { column: 4, down: true } });
  };

  const casts = (place, run) => table(place, [
    { name: "op", value: (row) => short(row.op), code: true },
    { name: "policy", value: (row) => row.policy },
    { name: "module", value: (row) => row.module || (row.root ? `(${row.root})` : ""), code: true },
    { name: "called at", value: (row) => row.location ?? "", code: true },
    { name: "dtypes", value: (row) => `${dtypes(row.dtypes_in)} → ${dtypes(row.dtypes_out)}` },
    { name: "calls", value: (row) => row.calls, text: (row) => count(row.calls), number: true },
    { name: "casts", value: (row) => row.casts, text: (row) => count(row.casts), number: true },
    { name: "spared", value: (row) => row.spared, text: (row) => count(row.spared), number: true },
    { name: "cast", value: (row) => row.bytes_cast, text: (row) => bytes(row.bytes_cast), number: true },
  ], run.trace.rows, { label: "call sites", sort: { column: 8, down: true }, empty: "No step was sampled." });

  const copy = (pane) => {
    const button = pane.querySelector(".copy");
    button?.addEventListener("click", async () => {
      const code = pane.querySelector(".diff code");
      const said = pane.querySelector(".said");
      try {
        await navigator.clipboard.writeText(code.textContent);
        said.textContent = "Copied.";
      } catch {
        getSelection().selectAllChildren(code);
        said.textContent = document.execCommand("copy") ? "Copied." : "Selected: press Ctrl+C.";
      }
    });
  };

  const find = (selector) => document.querySelector(selector);
  copy(find("#changes"));
  timeline(find("#timeline .chart"), RUN);
  exponents(find("#ranges"), RUN);
  casts(find("[data-table=casts]"), RUN);

  const again = () => redraws.forEach((redraw) => redraw());
  window.addEventListener("resize", again);
})();
